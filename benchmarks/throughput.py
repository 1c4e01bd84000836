"""Tokens per second of plain packed Megatron and of `--distca`, on real processes.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --schedulers greedy tiles --mixes pretrain prolong
    python benchmarks/throughput.py --processes 4 --stages 2 --layers 4 --seq-length 2048

Windows of documents, none longer than a rank's tokens, are trained on by plain Megatron and by each
scheduler in turn, in the same processes and with the same weights, so that a machine whose speed
drifts slows all.

Without pipeline stages each process is pinned to a core of its own, and beside the ratio is printed
the *ideal* ratio: what perfect balance of the visible pairs would give if moving bytes and planning
cost nothing. The time of a step is taken to be `rest + c * pairs of the busiest rank`; `c` and
`rest` follow from the step itself and from one whose documents are all one block long, with hardly
a pair. Measured times can beat it: kernels run faster on longer tasks.

With stages a batch is several micro-batches, and `--distca` is measured with each stage's servers
apart, too. Cores are usually fewer than processes then, so beside the wall clock stand the CPU time
of the ranks and the *replayed* time: how long the step would take with a core for each process and
with messages that take no time (`benchmarks/replay.py`). The ideal is that of passes that take
`rest + c * pairs`, fitted to plain Megatron's, with pairs perfectly shared out.

The mixes are the distributions of `data/lengths.py`, scaled so that 65,536 of their tokens are a
rank's, and "long-tail": lognormal around a 16th of a rank's tokens with sigma 2.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lengths_only import VOCABULARY, stream_of
from replay import timed_passes
from throughput_summary import (
    LONG_TAIL,
    MODES,
    PLAIN,
    SHORT,
    Setting,
    Step,
    document_lengths,
    summarize,
    table,
)
from torch.profiler import ProfilerActivity, profile

from data.lengths import DISTRIBUTIONS
from distca.plan import BLOCK
from distca.schedule import SCHEDULERS


def flags(setting: Setting) -> list[str]:
    """The flags of every run."""
    heads = setting.hidden_size // 32
    batch = setting.data_parallel_size * setting.micro_batches
    return f"""
        --num-layers {setting.layers} --hidden-size {setting.hidden_size}
        --num-attention-heads {heads} --group-query-attention --num-query-groups {heads // 4}
        --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --seq-length {setting.seq_length} --micro-batch-size 1
        --global-batch-size {batch} --train-iters 1000 --lr 1e-4
        --pipeline-model-parallel-size {setting.stages}
        --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --data-path none --eval-iters 0
    """.split()


class Measured:
    """One way to train, whose steps can be timed one by one."""

    def __init__(self, setting: Setting, more_flags: list[str]) -> None:
        from megatron_patches.arguments import add_distca_arguments, validate_distca_arguments
        from megatron_patches.data import batch_maker, window_layout
        from megatron_patches.gpt_job import GPT_JOB
        from megatron_patches.lean.arguments import parse_args
        from megatron_patches.lean.training import (
            build_model_and_optimizer,
            choose_forward_backward_func,
        )

        given = [*flags(setting), *more_flags]
        self.args = parse_args(add_distca_arguments, given, setting.processes)
        validate_distca_arguments(self.args)
        self._job, self._setting = GPT_JOB, setting
        self._maker = batch_maker(self.args, window_layout(self.args), torch.device("cpu"))
        self._model, self._optimizer = build_model_and_optimizer(GPT_JOB, self.args)
        self._forward_backward = choose_forward_backward_func(GPT_JOB, self.args)

    def leave_out_reduction(self) -> None:
        """From here on steps don't reduce gradients."""
        from megatron.core.utils import get_model_config

        get_model_config(self._model[0]).finalize_model_grads_func = None

    def step(self, lengths: list[int], batch: int) -> Step:
        """A whole training step on a global batch."""
        from megatron_patches.job import DataIterators
        from megatron_patches.lean.training import Run, forward_backward

        batches = self._batches(lengths, batch * self.args.global_batch_size)
        data = DataIterators(batches, None, None)
        run = Run(
            self._job, self.args, self._model, self._optimizer, None, [data], self._forward_backward
        )
        for chunk in self._model:
            chunk.train()
            chunk.zero_grad_buffer()
        done = Step()
        with self._watched(batches, done):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            forward_backward(run, "train", forward_only=False)
            self._optimizer.step()
            done.cpu_seconds = time.process_time() - cpu
            dist.barrier()
            done.seconds = time.perf_counter() - start
        batches.close()
        return done

    def peak_bytes(self, lengths: list[int], batch: int) -> int:
        """The most that a step's tensors take at once, and core attention's buffers with them.

        Parameters, their gradients and the optimizer's state stand between steps and are left out.
        """
        from megatron_patches.data import PlannedMaker

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            self.step(lengths, batch)
        # The allocator reports each tensor's bytes when it comes and, negative, when it goes.
        changes = [
            event.nbytes()
            for event in recorded.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        peak = int(np.cumsum([0, *changes]).max())
        if isinstance(self._maker, PlannedMaker):
            peak += self._maker.core_attention.buffers.nbytes
        return peak

    def _batches(self, lengths: list[int], first: int) -> Any:
        """Micro-batches, or ticks, from a sample of a stream of such documents on."""
        from megatron_patches.batch import MicroBatches
        from megatron_patches.data import PlannedMaker
        from megatron_patches.tick_batches import TickStream

        stream = stream_of(lengths)
        device = torch.device("cpu")
        if isinstance(self._maker, PlannedMaker):
            ticks = self._maker(stream, forward_only=False)
            return TickStream(ticks, first, self._maker.micro_batches, device)
        return MicroBatches(self._maker(stream), first, self._setting.data_parallel_size, device)

    @contextmanager
    def _watched(self, batches: Any, done: Step) -> Iterator[None]:
        """Notes the CPU time of ticks or of a pipeline's passes, and what exchanges cost."""
        if self.args.distca:
            core_attention = batches.batches.core_attention
            trace, transport = core_attention.trace, core_attention.transport
            before = transport.bytes_sent.copy()
            trace.recording = True
            yield
            trace.recording = False
            sent = transport.bytes_sent - before
            done.bytes_sent = sum(sent.values())
            spans = [span for span in trace.take(0) if span["cat"] == "ticks"]
            done.ticks = [span["tdur"] / 1e6 for span in spans]
        elif self._setting.stages > 1:
            with timed_passes() as passes:
                yield
            done.passes = passes
        else:
            yield


def start_process(rank: int, setting: Setting, store: str) -> None:
    """Process groups and Megatron's state of one process, on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, setting.processes),
        rank=rank,
        world_size=setting.processes,
    )
    from megatron_patches.arguments import add_distca_arguments
    from megatron_patches.lean.arguments import parse_args
    from megatron_patches.lean.training import initialize_megatron

    initialize_megatron(parse_args(add_distca_arguments, flags(setting), setting.processes))


def measure(rank: int, setting: Setting, store: str, output: str) -> None:
    """One process of the measurement."""
    start_process(rank, setting, store)
    ways = {name: Measured(setting, more) for name, more in setting.ways().items()}
    short_documents = [BLOCK] * (setting.batches * setting.tokens // BLOCK)
    for way in ways.values():
        way.step(short_documents, 0)
    steps: dict[str, dict[str, list[list[Step]]]] = {}
    for mix in setting.mixes:
        lengths = document_lengths(setting, mix)
        steps[mix] = {name: [] for name in ways}
        if setting.stages == 1:
            steps[mix][SHORT] = []
        for batch in range(setting.batches):
            rows: dict[str, list[Step]] = {name: [] for name in steps[mix]}
            for number in range(setting.rounds):
                # Whoever comes first or last may be better off, so all do in turn.
                order = [*rows][number % len(rows) :] + [*rows][: number % len(rows)]
                for name in order:
                    documents = short_documents if name == SHORT else lengths
                    rows[name].append(ways.get(name, ways[PLAIN]).step(documents, batch))
            for name, row in rows.items():
                steps[mix][name].append(row)
                if batch == 0 and name in ways:
                    row[0].peak_bytes = ways[name].peak_bytes(lengths, batch)
    everyones: list[Any] = [None] * setting.processes
    dist.all_gather_object(everyones, steps)
    if rank == 0:
        summaries = {mix: summarize(setting, mix, [own[mix] for own in everyones]) for mix in steps}
        Path(output).write_text(json.dumps(summaries))
    dist.barrier()
    dist.destroy_process_group()


def measured(setting: Setting) -> dict[str, Any]:
    """The summaries of all mixes; starts the processes."""
    # The profiler's own switch: it would write a line for every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "summaries.json"
        torch.multiprocessing.spawn(
            measure,
            args=(setting, str(Path(folder) / "store"), str(found)),
            nprocs=setting.processes,
        )
        return dict(json.loads(found.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--stages", type=int, default=1, help="of the pipeline")
    parser.add_argument("--micro-batches", type=int, help="default: twice the stages, or one")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedulers", nargs="+", default=["tiles"], choices=list(SCHEDULERS))
    parser.add_argument(
        "--modes", nargs="+", default=["ping-pong"], choices=MODES, help="one or two nano-batches"
    )
    parser.add_argument(
        "--tolerances",
        type=float,
        nargs="+",
        default=[0.02],
        help="of server loads; small, as bytes between processes of one machine are cheap",
    )
    parser.add_argument(
        "--mixes", nargs="+", default=[LONG_TAIL], choices=[LONG_TAIL, *DISTRIBUTIONS]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    args = vars(parser.parse_args())
    output = args.pop("json")
    if args["stages"] < 1 or args["processes"] % args["stages"]:
        parser.error(f"--stages {args['stages']} does not divide {args['processes']} processes")
    if args["micro_batches"] is None:
        args["micro_batches"] = 1 if args["stages"] == 1 else 2 * args["stages"]
    args |= {name: tuple(args[name]) for name in ("schedulers", "modes", "mixes", "tolerances")}
    setting = Setting(**args)
    summaries = measured(setting)
    print(table(setting, summaries))
    if output is not None:
        report = {"setting": asdict(setting), "mixes": summaries}
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
