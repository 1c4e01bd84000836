"""The registry of schedulers, by name."""

from __future__ import annotations

from collections.abc import Callable

from distca.schedule.base import ScheduleConfig, Scheduler
from distca.schedule.baselines.context_parallel import PerDocumentContextParallel, RingZigzag
from distca.schedule.baselines.dynamic_cp import DynamicContextParallel
from distca.schedule.baselines.hybrid_cp import HybridContextParallel
from distca.schedule.baselines.packed import PackedScheduler
from distca.schedule.baselines.wlb_llm import WlbLlm
from distca.schedule.chunks import OverChunks
from distca.schedule.greedy import GreedyScheduler
from distca.schedule.tiles.scheduler import TilesScheduler

COMPARED: dict[str, Callable[[ScheduleConfig], Scheduler]] = {
    "packed": PackedScheduler,
    "per-document-cp": PerDocumentContextParallel,
    "ring-zigzag": RingZigzag,
    "hybrid-cp": HybridContextParallel,
    "dynamic-cp": DynamicContextParallel,
    "wlb-llm": WlbLlm,
    "greedy": GreedyScheduler,
    "tiles": TilesScheduler,
}
"""All schedulers by name: first what Megatron's users have, the best last."""

IN_ROUNDS = ("hybrid-cp", "dynamic-cp")
"""Those whose plans are of several rounds. They are Megatron's own, which trains so with
`--hybrid-context-parallel` and, in a version to come, `--dynamic-context-parallel`."""

SCHEDULERS = {name: make for name, make in COMPARED.items() if name not in IN_ROUNDS}
"""Those that `--distca` trains with."""

BALANCING = ("greedy", "tiles")
"""Schedulers that move tasks away from the owners of their queries."""


def make_scheduler(name: str, config: ScheduleConfig) -> OverChunks:
    """Makes the scheduler of a name.

    Raises:
        ValueError: no scheduler has this name.
    """
    if name not in COMPARED:
        raise ValueError(f"no scheduler {name!r}: choose from {', '.join(COMPARED)}")
    return OverChunks(COMPARED[name](config))
