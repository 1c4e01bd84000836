"""Schedulers: who owns which tokens, and who computes which task."""

from collections.abc import Callable

from distca.schedule.base import ScheduleConfig, Scheduler, document_loads, even_rooms
from distca.schedule.context_parallel import PerDocumentContextParallel, RingZigzag
from distca.schedule.greedy import GreedyScheduler
from distca.schedule.micro_batches import share_out
from distca.schedule.nano_batches import Crossing, NanoPlan, plan_halves, split_in_two
from distca.schedule.packed import PackedScheduler
from distca.schedule.pooling import pool, pool_nano_batches
from distca.schedule.report import PlanSummary, describe, format_summary
from distca.schedule.ticks import (
    Phase,
    Tick,
    TickSchedule,
    Work,
    most_in_flight_of_1f1b,
    tick_schedule,
)
from distca.schedule.tiles import TilesScheduler, move_tiles
from distca.schedule.wlb_llm import WlbLlm

SCHEDULERS: dict[str, Callable[[ScheduleConfig], Scheduler]] = {
    "packed": PackedScheduler,
    "per-document-cp": PerDocumentContextParallel,
    "ring-zigzag": RingZigzag,
    "wlb-llm": WlbLlm,
    "greedy": GreedyScheduler,
    "tiles": TilesScheduler,
}
"""By name; those that don't balance first, the best last."""

BALANCING = ("greedy", "tiles")
"""Those that move tasks away from the owners of their queries."""


def make_scheduler(name: str, config: ScheduleConfig) -> Scheduler:
    """The scheduler of a name.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in SCHEDULERS:
        raise ValueError(f"no scheduler {name!r}: choose from {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name](config)


__all__ = [
    "BALANCING",
    "SCHEDULERS",
    "Crossing",
    "GreedyScheduler",
    "NanoPlan",
    "PackedScheduler",
    "PerDocumentContextParallel",
    "Phase",
    "PlanSummary",
    "RingZigzag",
    "ScheduleConfig",
    "Scheduler",
    "Tick",
    "TickSchedule",
    "TilesScheduler",
    "WlbLlm",
    "Work",
    "describe",
    "document_loads",
    "even_rooms",
    "format_summary",
    "make_scheduler",
    "most_in_flight_of_1f1b",
    "move_tiles",
    "plan_halves",
    "pool",
    "pool_nano_batches",
    "share_out",
    "split_in_two",
    "tick_schedule",
]
