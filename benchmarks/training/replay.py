"""Replay of a step from its CPU times, as if every process had a core of its own.

On a machine with fewer cores than processes the wall clock shows the amount of work, not who waits
for whom. The CPU time of a pass does not depend on who else runs. So passes are timed on the
CPU, and the schedule's dependencies are replayed with these times; messages take none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distca.plan.span import Floats


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
