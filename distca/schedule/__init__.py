"""Schedulers: who computes which task."""

from collections.abc import Callable

from distca.schedule.base import ScheduleConfig, Scheduler
from distca.schedule.greedy import GreedyScheduler
from distca.schedule.null import NullScheduler
from distca.schedule.report import PlanSummary, describe, format_summary

SCHEDULERS: dict[str, Callable[[ScheduleConfig], Scheduler]] = {
    "greedy": GreedyScheduler,
    "null": NullScheduler,
}


def make_scheduler(name: str, config: ScheduleConfig) -> Scheduler:
    """The scheduler of a name.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in SCHEDULERS:
        raise ValueError(f"no scheduler {name!r}: choose from {', '.join(sorted(SCHEDULERS))}")
    return SCHEDULERS[name](config)


__all__ = [
    "SCHEDULERS",
    "GreedyScheduler",
    "NullScheduler",
    "PlanSummary",
    "ScheduleConfig",
    "Scheduler",
    "describe",
    "format_summary",
    "make_scheduler",
]
