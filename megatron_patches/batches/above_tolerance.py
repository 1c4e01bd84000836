"""The reason why plans are above `--distca-tolerance`, for the log of a run."""

from __future__ import annotations

from collections.abc import Iterable

from distca.plan import Plan
from distca.schedule import ScheduleConfig
from distca.schedule.base import relative_loads, server_loads


def why_above_tolerance(plans: Iterable[Plan], config: ScheduleConfig) -> str | None:
    """Returns the note of the first plan that is above the tolerance; None: there is none.

    Baselines balance nothing, and note nothing. A tick's plan may have notes of its stages' plans
    although it is balanced itself, over the servers of all stages.

    Args:
        plans: final plans, over all servers.
        config: tolerance, cost model and speeds that the plans were made with.
    """
    for plan in plans:
        if plan.notes:
            servers = plan.world_size
            loads = server_loads(plan.tasks, plan.mask, servers, config.cost_model)
            busiest = float(relative_loads(loads, config.speeds_of(servers)).max())
            if busiest > 1 + config.tolerance:
                return plan.notes[0]
    return None
