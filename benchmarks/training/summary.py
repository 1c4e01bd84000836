"""Figures of a training step that `throughput.py` keeps, and those that follow from all steps.

Steps of a pipeline on CPUs are *replayed*, as if every process had a core of its own. On a machine
with fewer cores than processes the wall clock shows the amount of work, not who waits for whom. The
CPU time of a pass does not depend on who else runs. So passes are timed on the CPU, and the
schedule's dependencies are replayed with these times; messages take none.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.training.setting import APART, PLAIN, SHORT, Setting, pairs_of_ranks
from distca.cost.model_sizes import ModelSize
from distca.plan import BLOCK, Mask
from distca.plan.plan import max_over_mean
from distca.plan.span import Floats, Int64s
from distca.schedule import tick_schedule


class TimedPass(NamedTuple):
    """A forward or backward pass of a stage.

    Attributes:
        direction: "forward" or "backward".
        micro_batch: number of the micro-batch in the global batch.
        seconds: CPU time of the pass.
    """

    direction: str
    micro_batch: int
    seconds: float


@dataclass
class Step:
    """Figures of a training step on one rank.

    Attributes:
        seconds: wall time from barrier to barrier, planning included.
        cpu_seconds: CPU time of the process.
        passes: timed passes of plain Megatron's pipeline, on CPUs.
        ticks: CPU seconds of each tick of `--distca`.
        pairs: visible pairs of this rank's kernels in each forward tick of `--distca`, in a layer.
        kernel_seconds: time of core attention's kernels in each tick of `--distca`.
        exposed_seconds: time for which `--distca` waited for exchanges.
        bytes_sent: bytes sent to other ranks, by phase of the exchange.
        peak_bytes: peak size of tensors beside parameters and optimizer; 0 where not measured.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    passes: list[TimedPass] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    kernel_seconds: list[float] = field(default_factory=list)
    exposed_seconds: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0

    def read_timeline(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Takes ticks, kernels and waits from the events of `distca.runtime.Trace.take`."""
        ticks = [event for event in events if event["cat"] == "ticks"]
        self.ticks = [tick["tdur"] / 1e6 for tick in ticks]
        self.pairs = [t["args"]["pairs"] for t in ticks if t["args"]["phase"] == "forward"]
        self.kernel_seconds = [0.0] * len(ticks)
        self.exposed_seconds = 0.0
        for event in events:
            if event["cat"] == "kernels":
                self.kernel_seconds[event["args"]["tick"]] += event["dur"] / 1e6
            elif event["cat"] == "exchange" and event["name"].startswith("wait for"):
                self.exposed_seconds += event["dur"] / 1e6


Ranks = list[dict[str, list[list[Step]]]]
"""Steps of each rank by way, batch and round."""


@contextlib.contextmanager
def timed_passes() -> Iterator[list[TimedPass]]:
    """Collects the passes of megatron-core's own schedules while it is entered."""
    from megatron.core.pipeline_parallel import schedules

    passes: list[TimedPass] = []
    original = {"forward": schedules.forward_step, "backward": schedules.backward_step}

    def timed(direction: str) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = original[direction](*args, **kwargs)
            seconds = time.thread_time() - start
            number = sum(each.direction == direction for each in passes)
            passes.append(TimedPass(direction, number, seconds))
            return result

        return step

    schedules.forward_step = timed("forward")
    schedules.backward_step = timed("backward")
    try:
        yield passes
    finally:
        schedules.forward_step = original["forward"]
        schedules.backward_step = original["backward"]


def summarize(
    setting: Setting, mix: str, ranks: Ranks, model: ModelSize, mask: Mask
) -> dict[str, Any]:
    """Summarizes one mix: medians, ratios and the ideal.

    Args:
        setting: sizes and ways of the measurement.
        mix: name of the mix of documents.
        ranks: steps of all processes.
        model: sizes of the trained model.
        mask: tokens that a query sees.
    """
    median = {
        name: [statistics.median(step.seconds for step in row) for row in rows]
        for name, rows in ranks[0].items()
    }
    pairs = pairs_of_ranks(setting, mix, mask)
    short = [rank[SHORT] for rank in ranks if SHORT in rank]
    flops = model.training_flops(setting.batches * setting.tokens, int(pairs.sum()))
    ways: dict[str, dict[str, Any]] = {}
    for name in setting.ways():
        seconds = sum(median[name])
        own = [rank[name] for rank in ranks]
        ways[name] = {
            "tokens_per_second": setting.batches * setting.tokens / seconds,
            "ratio": sum(median[PLAIN]) / seconds,
            "cpu_seconds_of_ranks": [
                statistics.mean(step.cpu_seconds for row in rows for step in row) for rows in own
            ],
            "seconds": seconds,
            "mfu": None
            if setting.peak_tflops is None
            else flops / (seconds * setting.processes * setting.peak_tflops * 1e12),
            "bytes_sent_of_ranks": [
                sum(sum(row[0].bytes_sent.values()) for row in rows) for rows in own
            ],
            "peak_bytes": max(step.peak_bytes for rows in own for row in rows for step in row),
        }
        if setting.shares_cores:
            ways[name]["busiest_cpu_seconds"] = busiest_cpu_seconds(own)
        if name == PLAIN:
            # Ranks wait for each other at the end of a step.
            ways[name]["pairs_max_over_mean"] = busiest_over_mean(pairs.sum(axis=1))
        else:
            ways[name] |= _of_servers(own, seconds)
    if setting.stages == 1:
        ideal = _ideal_seconds(setting, pairs.sum(axis=1), mask, median[PLAIN], median[SHORT])
        for way in ways.values():
            way["ideal_ratio"] = sum(median[PLAIN]) / ideal
    elif ranks[0][PLAIN][0][0].passes:
        _add_replayed(setting, pairs, ranks[:: setting.tensor_parallel], ways)
    return {
        "max_over_mean_pairs": [
            max_over_mean(loads) for loads in pairs.reshape(-1, pairs.shape[-1])
        ],
        "model_flops": flops,
        "seconds": median,
        "ways": ways,
        **({"short_cpu_seconds": busiest_cpu_seconds(short)} if setting.shares_cores else {}),
    }


def busiest_cpu_seconds(own: Sequence[Sequence[Sequence[Step]]]) -> list[float]:
    """Returns the CPU seconds of the busiest rank in each batch, of its median round.

    Args:
        own: steps of each rank, by batch and round.
    """
    return [
        max(statistics.median(step.cpu_seconds for step in rows[batch]) for rows in own)
        for batch in range(len(own[0]))
    ]


def _of_servers(own: list[Any], seconds: float) -> dict[str, Any]:
    """Figures of `--distca` alone: balance between servers, and exposed time of exchanges.

    Args:
        own: steps of each rank, by batch and round.
        seconds: total time of the way's steps.
    """
    # [batches][ticks, ranks]: all ranks wait for each other in a tick.
    batches = range(len(own[0]))
    pairs = [np.array([rows[batch][0].pairs for rows in own]).T for batch in batches]
    kernels = [
        np.array(
            [np.median([step.kernel_seconds for step in rows[batch]], axis=0) for rows in own]
        ).T
        for batch in batches
    ]
    exposed = [
        sum(statistics.median(step.exposed_seconds for step in row) for row in rows) for rows in own
    ]
    return {
        "pairs_max_over_mean": busiest_over_mean(np.concatenate(pairs)),
        "kernels_max_over_mean": busiest_over_mean(np.concatenate(kernels)),
        "kernel_seconds_of_ranks": np.concatenate(kernels).sum(axis=0).tolist(),
        "exposed_share": statistics.mean(exposed) / seconds,
    }


def busiest_over_mean(loads: Any) -> float:
    """Ratio of the busiest ranks' loads to the mean: 1 where loads are even, or all zero.

    Args:
        loads: loads of ranks between two points at which they wait for each other,
            `[points, ranks]`.
    """
    mean = float(loads.mean(axis=1).sum())
    return float(loads.max(axis=1).sum()) / mean if mean else 1.0


def _ideal_seconds(
    setting: Setting, pairs: Int64s, mask: Mask, plain: list[float], short: list[float]
) -> float:
    """Seconds of all batches if their pairs, `[batches, ranks]`, were perfectly shared out."""
    rest = statistics.median(short)
    short_pairs = setting.micro_batches * setting.seq_length // BLOCK
    short_pairs *= mask.pairs(0, BLOCK, 0, BLOCK)
    total = 0.0
    for seconds, loads in zip(plain, pairs, strict=True):
        per_pair = max(seconds - rest, 0.0) / max(loads.max() - short_pairs, 1)
        total += seconds - per_pair * (loads.max() - loads.mean())
    return float(total)


def _add_replayed(
    setting: Setting, pairs: Int64s, ranks: Ranks, ways: dict[str, dict[str, Any]]
) -> None:
    """Adds replayed seconds, their ratio and the ideal ratio to each way.

    Args:
        setting: sizes and ways of the measurement.
        pairs: visible pairs in the order drawn, `[batches, micro-batches, data-parallel ranks]`.
        ranks: steps of one process of each tensor-parallel group.
        ways: figures of each way, to which the new ones are added.
    """

    def column(data_rank: int) -> Ranks:
        return ranks[data_rank :: setting.data_parallel_size]

    def plain(batch: int, passes_of: Any) -> float:
        return max(
            replay([passes_of(stage, own, data, batch) for stage, own in enumerate(column(data))])
            for data in range(setting.data_parallel_size)
        )

    def measured(stage: int, own: Any, data: int, batch: int) -> list[TimedPass]:
        rounds = [step.passes for step in own[PLAIN][batch]]
        return [
            first._replace(seconds=statistics.median(each.seconds for each in (first, *others)))
            for first, *others in zip(*rounds, strict=True)
        ]

    models = {}
    for stage in range(setting.stages):
        for direction in ("forward", "backward"):
            found = [
                (pairs[batch, each.micro_batch, data], each.seconds)
                for data in range(setting.data_parallel_size)
                for batch in range(setting.batches)
                for each in measured(stage, column(data)[stage], data, batch)
                if each.direction == direction
            ]
            models[stage, direction] = fit(*zip(*found, strict=True))

    def modelled(stage: int, own: Any, data: int, batch: int) -> list[TimedPass]:
        fitted = []
        for each in measured(stage, own, data, batch):
            rest, per_pair = models[stage, each.direction]
            seconds = rest + per_pair * float(pairs[batch, each.micro_batch, data])
            fitted.append(each._replace(seconds=seconds))
        return fitted

    batches = range(setting.batches)
    plain_seconds = sum(plain(batch, measured) for batch in batches)
    plain_modelled = sum(plain(batch, modelled) for batch in batches)
    for name, way in ways.items():
        if name == PLAIN:
            seconds, ideal = plain_seconds, plain_modelled
        else:
            seconds = 0.0
            for batch in batches:
                rounds = [[step.ticks for step in own[name][batch]] for own in ranks]
                table: Floats = np.median(np.array(rounds), axis=1)
                seconds += ticks_seconds(list(table.T))
            ideal = sum(
                _ideal_ticks(setting, float(pairs[batch].sum()), models, APART not in name)
                for batch in batches
            )
        way["replayed_seconds"] = seconds
        way["replayed_ratio"] = plain_seconds / seconds
        way["ideal_ratio"] = plain_modelled / ideal


def _ideal_ticks(
    setting: Setting, pairs: float, models: dict[tuple[int, str], tuple[float, float]], pooled: bool
) -> float:
    """Seconds of a batch's ticks if pairs were perfectly shared out, over stages or within them."""
    each = pairs / setting.micro_batches / setting.data_parallel_size
    total = 0.0
    for tick in tick_schedule(setting.micro_batches, setting.stages).ticks:
        working = [
            models[n, tick.direction] for n, work in enumerate(tick.work) if work is not None
        ]
        shared = each * (len(working) / setting.stages if pooled else 1.0)
        total += max(rest for rest, _ in working)
        total += shared * statistics.mean(per_pair for _, per_pair in working)
    return total


def replay(stages: Sequence[Sequence[TimedPass]]) -> float:
    """Seconds until every stage of a pipeline has done its passes, in their order.

    A forward pass waits for the stage before, a backward pass for the one after.

    Args:
        stages: passes of each stage, in the stage's order.
    """
    ends: dict[tuple[int, str, int], float] = {}
    clocks, at = [0.0] * len(stages), [0] * len(stages)
    while any(at[stage] < len(passes) for stage, passes in enumerate(stages)):
        advanced = False
        for stage, passes in enumerate(stages):
            while at[stage] < len(passes):
                direction, number, seconds = passes[at[stage]]
                other = stage - 1 if direction == "forward" else stage + 1
                key = (other, direction, number)
                if 0 <= other < len(stages) and key not in ends:
                    break
                start = max(clocks[stage], ends.get(key, 0.0))
                clocks[stage] = ends[stage, direction, number] = start + seconds
                at[stage] += 1
                advanced = True
        assert advanced, "passes wait for each other"
    return max(clocks)


def fit(pairs: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits seconds of a pass without pairs, and of a pair, by least squares; none negative."""
    x, y = np.asarray(pairs, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if np.ptp(x) == 0:
        return float(y.mean()), 0.0
    slope = max(float(np.polyfit(x, y, 1)[0]), 0.0)
    return max(float((y - slope * x).mean()), 0.0), slope


def ticks_seconds(ticks: Sequence[Floats]) -> float:
    """Seconds of ticks, each `[ranks]`, in which all ranks wait for the slowest."""
    return sum(float(np.max(seconds)) for seconds in ticks)
