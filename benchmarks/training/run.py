"""Processes of `throughput.py`, which build each way to train and time its steps."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.lengths_only import VOCABULARY, stream_of
from benchmarks.training.setting import PLAIN, SHORT, Setting, document_lengths
from benchmarks.training.summary import Step, summarize, timed_passes
from distca.cost.model_sizes import ModelSize
from distca.lifetime import end_with_parent
from distca.plan import BLOCK
from distca.progress import Progress, progress


def parsed(setting: Setting, more_flags: list[str]) -> Namespace:
    """Parses Megatron's arguments for a way to train.

    Raises:
        ValueError: the flags don't go together.
    """
    from megatron_patches.parts import parse_args

    rank = dist.get_rank() if dist.is_initialized() else 0
    return parse_args([*setting.flags(), *more_flags], rank, setting.processes)


def model_size(args: Namespace) -> ModelSize:
    """Sizes of the trained model, with its padded vocabulary."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return ModelSize(
        args.num_layers,
        args.hidden_size,
        args.num_attention_heads,
        args.num_query_groups,
        args.kv_channels,
        args.ffn_hidden_size,
        math.ceil(VOCABULARY / multiple) * multiple,
    )


class Measured:
    """A way to train, whose steps can be timed one by one.

    Steps follow each other as in training: the next one is planned ahead, by processes that start
    with the first.
    """

    def __init__(self, setting: Setting, more_flags: list[str]) -> None:
        from megatron_patches.flags.config import DistcaConfig
        from megatron_patches.loop.data import model_device, window_layout
        from megatron_patches.parts import build_run
        from megatron_patches.pipeline.planned_data import PlannedData

        self.args = parsed(setting, more_flags)
        self._setting, self._device = setting, model_device()
        self._config, self._layout = DistcaConfig.from_args(self.args), window_layout(self.args)
        # Sets the padded size of the vocabulary, by which ticks are planned.
        self._run = build_run(self.args)
        self._planned: PlannedData | None = None
        if self._config.enabled:
            self._planned = PlannedData.start(self._config, self.args, self._layout, self._device)

    def leave_out_reduction(self) -> None:
        """Turns off the reduction of gradients in all later steps."""
        self._run.config.finalize_model_grads_func = None

    def batches(self, lengths: list[int]) -> Any:
        """Iterates over the micro-batches, or ticks, of the documents' global batches."""
        from megatron_patches.loop.data import packed_iterator
        from megatron_patches.pipeline.data_iterators import TRAIN

        stream = stream_of(lengths)
        if self._planned is None:
            return packed_iterator(self._config, self.args, self._layout, stream, 0)
        return self._planned.iterator(stream, TRAIN, 0)

    def step(self, batches: Any) -> Step:
        """Runs and times a whole training step on the next global batch."""
        self._run.begin_step()
        done = Step()
        with self._watched(batches, done):
            self._barrier()
            start, cpu = time.perf_counter(), time.process_time()
            self._run.forward_backward(batches)
            self._run.optimizer.step()
            done.cpu_seconds = time.process_time() - cpu
            self._barrier()
            done.seconds = time.perf_counter() - start
        return done

    def _barrier(self) -> None:
        """Waits until all processes have come here, and their GPUs have finished."""
        dist.barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self, batches: Any) -> int:
        """Peak bytes of a step's tensors and core attention's buffers.

        Parameters, their gradients and the optimizer's state stand between steps and are left out.
        """
        if self._device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step(batches)
            peak = torch.cuda.max_memory_allocated() - before
        else:
            peak = self._peak_on_cpu(batches)
        if self._planned is not None:
            peak += self._planned.runtime.core_attention.buffers.nbytes
        return peak

    def _peak_on_cpu(self, batches: Any) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            self.step(batches)
        # The allocator reports each tensor's bytes when it comes and, negative, when it goes.
        changes = [
            event.nbytes()
            for event in recorded.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        return int(np.cumsum([0, *changes]).max())

    def close(self) -> None:
        """Closes the transport."""
        if self._planned is not None:
            self._planned.close()

    @contextmanager
    def _watched(self, batches: Any, done: Step) -> Iterator[None]:
        """Notes times of ticks and their exchanges, or the CPU time of a pipeline's passes."""
        if self._planned is not None:
            core_attention = self._planned.runtime.core_attention
            trace, transport = core_attention.trace, core_attention.transport
            heads = self._planned.runtime.heads
            counters = [transport.bytes_sent] + ([] if heads is None else [heads.bytes_sent])
            before = [each.copy() for each in counters]
            trace.recording = True
            yield
            trace.recording = False
            for counter, earlier in zip(counters, before, strict=True):
                done.bytes_sent |= dict(counter - earlier)
            done.read_timeline(trace.take(0))
        elif self._setting.stages > 1 and self._device.type == "cpu":
            with timed_passes() as passes:
                yield
            done.passes = passes
        else:
            yield


def start_process(rank: int, setting: Setting, store: str) -> None:
    """Initializes process groups and Megatron in a process that no launcher started.

    Without a GPU the process gets a core of its own. It ends with the process that started it.
    """
    end_with_parent()
    if not torch.cuda.is_available():
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
    begin(setting, rank, rank, dist.FileStore(store, setting.processes))


def begin(setting: Setting, rank: int, local_rank: int, store: Any = None) -> None:
    """Initializes process groups and Megatron, on a GPU of its own where there are any.

    Args:
        setting: setting of the measurement.
        rank: rank of this process.
        local_rank: number of this process on its machine.
        store: `torch.distributed.Store` in which processes without a launcher meet.
    """
    from megatron_patches.parts import initialize

    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        rank=rank,
        world_size=setting.processes,
        store=store,
    )
    initialize(parsed(setting, []))


def steps_lengths(setting: Setting, mix: str) -> list[int]:
    """Lengths of the documents of all steps: one that warms up, each batch in all rounds, and one
    for the memory."""
    lengths = document_lengths(setting, mix)
    number = (np.cumsum(lengths) - 1) // setting.tokens
    order = [0, *np.repeat(np.arange(setting.batches), setting.rounds), 0]
    return np.concatenate([np.array(lengths)[number == batch] for batch in order]).tolist()


def measure(setting: Setting) -> dict[str, Any] | None:
    """Runs one process of the measurement; ends the process groups.

    Returns:
        The summaries of all mixes on rank 0, None on the others.
    """
    from megatron_patches.flags.distca import mask_of_window

    # The profiler's own switch: else it writes a line for every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    ways = {name: Measured(setting, more) for name, more in setting.ways().items()}
    short_documents = [BLOCK] * ((setting.batches * setting.rounds + 1) * setting.tokens // BLOCK)
    names = [*ways, *([SHORT] if setting.stages == 1 else [])]
    steps: dict[str, dict[str, list[list[Step]]]] = {}
    rank = dist.get_rank()
    number_of_steps = len(setting.mixes) * setting.batches * setting.rounds * len(names)
    own = nullcontext(Progress())
    with progress("throughput", "steps", number_of_steps) if rank == 0 else own as shown:
        for mix in setting.mixes:
            lengths = steps_lengths(setting, mix)
            steps[mix] = {name: [] for name in names}
            trained = {
                name: ways.get(name, ways[PLAIN]).batches(
                    short_documents if name == SHORT else lengths
                )
                for name in names
            }
            for name, batches in trained.items():
                ways.get(name, ways[PLAIN]).step(batches)  # Warms up.
            for _ in range(setting.batches):
                rows: dict[str, list[Step]] = {name: [] for name in names}
                for number in range(setting.rounds):
                    # Whoever comes first or last may be better off, so all do in turn.
                    at = number % len(names)
                    for name in names[at:] + names[:at]:
                        rows[name].append(ways.get(name, ways[PLAIN]).step(trained[name]))
                        shown.update()
                for name, row in rows.items():
                    steps[mix][name].append(row)
            for name, way in ways.items():
                steps[mix][name][0][0].peak_bytes = way.peak_bytes(trained[name])
            for batches in trained.values():
                batches.close()
    everyones: list[Any] = [None] * setting.processes
    dist.all_gather_object(everyones, steps)
    summaries = None
    if rank == 0:
        args = ways[PLAIN].args
        model, mask = model_size(args), mask_of_window(args.window_size)
        summaries = {
            mix: summarize(setting, mix, [own[mix] for own in everyones], model, mask)
            for mix in steps
        }
    for way in ways.values():
        way.close()
    dist.barrier()
    dist.destroy_process_group()
    return summaries


def _spawned(rank: int, setting: Setting, store: str, output: str) -> None:
    start_process(rank, setting, store)
    summaries = measure(setting)
    if summaries is not None:
        Path(output).write_text(json.dumps(summaries))


def measured(setting: Setting) -> dict[str, Any]:
    """Runs the measurement in processes of this machine; returns the summaries of all mixes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "summaries.json"
        torch.multiprocessing.spawn(
            _spawned,
            args=(setting, str(Path(folder) / "store"), str(found)),
            nprocs=setting.processes,
        )
        return dict(json.loads(found.read_text()))
