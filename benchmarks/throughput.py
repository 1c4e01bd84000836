"""Tokens per second of plain packed Megatron and of `--distca`, on real processes.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --schedulers greedy tiles --mixes pretrain prolong

Each process is pinned to a core of its own. Windows of documents, none longer than a rank's tokens,
are trained on by plain Megatron and by each scheduler in turn, in the same processes and with the
same weights, so that a machine whose speed drifts slows all. Printed beside the ratio is the
*ideal* ratio: what perfect balance of the visible pairs would give if moving bytes and planning
cost nothing. The time of a step is taken to be `rest + c * pairs of the busiest rank`; `c` and
`rest` follow from the step itself and from one whose documents are all one block long, with hardly
a pair. Measured times can beat it: kernels run faster on longer tasks.

The mixes are the distributions of `data/lengths.py`, scaled so that 65,536 of their tokens are a
rank's, and "long-tail": lognormal around a 16th of a rank's tokens with sigma 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data.lengths import DISTRIBUTIONS, draw
from distca.plan import BLOCK, Mask
from distca.plan.plan import max_over_mean
from distca.schedule import SCHEDULERS


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        processes: data-parallel ranks, each on its own core.
        seq_length: tokens of a rank in a window.
        layers: transformer layers.
        hidden_size: width; a head has 32 elements, four heads share a key-value head.
        windows: different windows of each mix, each a training step.
        rounds: how often all windows are measured.
        schedulers: of `--distca-scheduler`.
        mixes: of document lengths: see the module.
        seed: of the document lengths.
    """

    processes: int
    seq_length: int
    layers: int
    hidden_size: int
    windows: int
    rounds: int
    schedulers: tuple[str, ...]
    mixes: tuple[str, ...]
    seed: int


LONG_TAIL = "long-tail"
_SCALE = 65_536


def document_lengths(setting: Setting, mix: str) -> list[int]:
    """Documents that fill all windows; one that reaches beyond a rank's tokens is cut there."""
    ranks = setting.windows * setting.processes
    if mix == LONG_TAIL:
        generator = np.random.default_rng(setting.seed)
        count = ranks * setting.seq_length
        drawn = np.exp(generator.normal(np.log(setting.seq_length / 16), 2.0, size=count))
    else:
        total = ranks * _SCALE
        drawn = draw(DISTRIBUTIONS[mix], total, setting.seed) * setting.seq_length / _SCALE
    drawn_lengths = iter(np.maximum(drawn, 1).astype(np.int64).tolist())
    lengths = []
    for _ in range(ranks):
        left = setting.seq_length
        while left:
            lengths.append(min(next(drawn_lengths, left), left))
            left -= lengths[-1]
    return lengths


def flags(setting: Setting, scheduler: str | None) -> list[str]:
    """The run's flags; without a scheduler plain Megatron's."""
    heads = setting.hidden_size // 32
    text = f"""
        --num-layers {setting.layers} --hidden-size {setting.hidden_size}
        --num-attention-heads {heads} --group-query-attention --num-query-groups {heads // 4}
        --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --seq-length {setting.seq_length} --micro-batch-size 1
        --global-batch-size {setting.processes} --train-iters 1000 --lr 1e-4
        --tokenizer-type NullTokenizer --vocab-size 511 --data-path none --eval-iters 0
    """
    return [*text.split(), *(["--distca", "--distca-scheduler", scheduler] if scheduler else [])]


@dataclass(frozen=True)
class LengthsOnly:
    """A corpus of which only the lengths matter."""

    lengths: np.ndarray

    def read(self, document: int, start: int, end: int) -> np.ndarray:
        return (np.arange(start, end) * 7 + document) % 511


class Measured:
    """One way to train, whose steps can be timed one by one."""

    def __init__(self, setting: Setting, scheduler: str | None) -> None:
        from megatron_patches.arguments import add_distca_arguments
        from megatron_patches.data import batch_maker, window_layout
        from megatron_patches.gpt_job import GPT_JOB
        from megatron_patches.lean.arguments import parse_args
        from megatron_patches.lean.training import build_model_and_optimizer

        self.args = parse_args(add_distca_arguments, flags(setting, scheduler), setting.processes)
        self._job = GPT_JOB
        self._make = batch_maker(self.args, window_layout(self.args), torch.device("cpu"))
        self._model, self._optimizer = build_model_and_optimizer(GPT_JOB, self.args)

    def seconds(self, lengths: list[int], window: int) -> float:
        """A whole training step on a window, from barrier to barrier, planning included."""
        from megatron_patches.batch import MicroBatches
        from megatron_patches.job import DataIterators
        from megatron_patches.lean.training import Run, forward_backward
        from megatron_patches.stream import TokenStream

        column = np.asarray(lengths, dtype=np.int64)
        numbers, zeros = np.arange(len(column)), np.zeros_like(column)
        offsets = np.concatenate([[0], np.cumsum(column)])
        corpora = (LengthsOnly(column),)
        stream = TokenStream(corpora, zeros, numbers, zeros, offsets)  # type: ignore[arg-type]
        per_window = self.args.data_parallel_size
        batches = MicroBatches(
            self._make(stream, 0), window * per_window, per_window, torch.device("cpu")
        )
        data = DataIterators(batches, None, None)
        run = Run(self._job, self.args, self._model, self._optimizer, None, [data])
        for chunk in self._model:
            chunk.train()
            chunk.zero_grad_buffer()
        dist.barrier()
        start = time.perf_counter()
        forward_backward(run, "train", forward_only=False)
        self._optimizer.step()
        dist.barrier()
        took = time.perf_counter() - start
        batches.close()
        return took


def measure(rank: int, setting: Setting, store: str, output: str) -> None:
    """One process of the measurement."""
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

    initialize_megatron(parse_args(add_distca_arguments, flags(setting, None), setting.processes))
    ways = {PLAIN: Measured(setting, None)}
    ways |= {name: Measured(setting, name) for name in setting.schedulers}
    tokens = setting.windows * setting.processes * setting.seq_length
    short_documents = [BLOCK] * (tokens // BLOCK)
    for way in ways.values():
        way.seconds(short_documents, 0)
    times: dict[str, dict[str, list[list[float]]]] = {}
    for mix in setting.mixes:
        lengths = document_lengths(setting, mix)
        times[mix] = {name: [] for name in (*ways, SHORT)}
        for window in range(setting.windows):
            rows: dict[str, list[float]] = {name: [] for name in times[mix]}
            for _ in range(setting.rounds):
                for name, way in ways.items():
                    rows[name].append(way.seconds(lengths, window))
                rows[SHORT].append(ways[PLAIN].seconds(short_documents, window))
            for name, row in rows.items():
                times[mix][name].append(row)
    if rank == 0:
        Path(output).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


PLAIN, SHORT = "plain", "documents of one block"


def pairs_of_ranks(setting: Setting, mix: str) -> np.ndarray:
    """Visible pairs of each rank's documents, `[windows, ranks]`."""
    loads = np.zeros(setting.windows * setting.processes, dtype=np.int64)
    at = 0
    for length in document_lengths(setting, mix):
        loads[at // setting.seq_length] += Mask().pairs(0, length, 0, length)
        at += length
    return loads.reshape(setting.windows, setting.processes)


def summarize(setting: Setting, mix: str, times: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians, ratios and the ideal of one mix."""
    median = {name: [statistics.median(row) for row in rows] for name, rows in times.items()}
    short = statistics.median(median[SHORT])
    pairs = pairs_of_ranks(setting, mix)
    short_pairs = setting.seq_length // BLOCK * Mask().pairs(0, BLOCK, 0, BLOCK)
    ideal_seconds = []
    for plain, loads in zip(median[PLAIN], pairs, strict=True):
        seconds_per_pair = max(plain - short, 0.0) / max(loads.max() - short_pairs, 1)
        ideal_seconds.append(plain - seconds_per_pair * (loads.max() - loads.mean()))
    tokens = setting.processes * setting.seq_length * setting.windows
    ideal = sum(median[PLAIN]) / sum(ideal_seconds)
    return {
        "max_over_mean_pairs": [max_over_mean(loads) for loads in pairs],
        "seconds": median,
        "ideal_ratio": ideal,
        "ways": {
            name: {
                "tokens_per_second": tokens / sum(median[name]),
                "ratio": sum(median[PLAIN]) / sum(median[name]),
                "of_ideal": sum(median[PLAIN]) / sum(median[name]) / ideal,
            }
            for name in (PLAIN, *setting.schedulers)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedulers", nargs="+", default=["tiles"], choices=list(SCHEDULERS))
    parser.add_argument(
        "--mixes", nargs="+", default=[LONG_TAIL], choices=[LONG_TAIL, *DISTRIBUTIONS]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    args = vars(parser.parse_args())
    output = args.pop("json")
    args |= {name: tuple(args[name]) for name in ("schedulers", "mixes")}
    setting = Setting(**args)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "times.json"
        torch.multiprocessing.spawn(
            measure,
            args=(setting, str(Path(folder) / "store"), str(found)),
            nprocs=setting.processes,
        )
        times = json.loads(found.read_text())
    summaries = {mix: summarize(setting, mix, rows) for mix, rows in times.items()}
    print("| mix | pairs max/mean | scheduler | tokens/s | ratio | ideal | of ideal |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for mix, summary in summaries.items():
        spread = summary["max_over_mean_pairs"]
        for name, way in summary["ways"].items():
            print(
                f"| {mix} | {min(spread):.2f} to {max(spread):.2f} | {name} | "
                f"{way['tokens_per_second']:.0f} | {way['ratio']:.3f} | "
                f"{summary['ideal_ratio']:.3f} | {way['of_ideal']:.1%} |"
            )
    if output is not None:
        report = {"setting": asdict(setting), "mixes": summaries}
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
