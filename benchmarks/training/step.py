"""Figures of a training step that `throughput.py` keeps, and the times of a pipeline's passes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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

    def read_timeline(self, events: list[dict[str, Any]]) -> None:
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
