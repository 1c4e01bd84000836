"""One plan for all stages of a pipeline that work at the same time (paper, Section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distca.plan import Placement, Plan, Tasks
from distca.plan.span import Int64s
from distca.schedule.base import Scheduler


def pool(plans: Sequence[Plan | None], servers: Int64s, scheduler: Scheduler | None = None) -> Plan:
    """The plan of a tick, in which each stage runs a micro-batch of its own or none.

    Placements stay: a micro-batch's tokens lie on the same data-parallel rank in every stage.

    Args:
        plans: of each stage's micro-batch over the stage's own ranks; None: the stage is idle. They
            have the same mask and block, and at least one is not None.
        servers: the number of each rank among the servers of all stages, int64 `[stages, ranks]`.
        scheduler: shares all stages' tasks out over all servers, those of idle stages included;
            None: every stage keeps its own plan.

    Returns:
        A plan over all servers, whose documents are those of stage 0, then 1, ...
    """
    if len(plans) == 1 and plans[0] is not None:
        return plans[0]
    lengths, placements, tasks = [], [], []
    first_document = 0
    some = next(plan for plan in plans if plan is not None)
    for plan, ranks in zip(plans, servers, strict=True):
        if plan is None:
            continue
        at, own = plan.placement, plan.tasks
        lengths.append(plan.lengths)
        placements.append(
            Placement(
                at.document + first_document, at.start, at.end, ranks[at.rank], int(servers.size)
            )
        )
        tasks.append(replace(own, document=own.document + first_document, server=ranks[own.server]))
        first_document += len(plan.lengths)
    placement = Placement.concatenate(placements)
    if scheduler is not None:
        return scheduler.schedule(np.concatenate(lengths), placement, some.mask)
    return replace(
        some,
        lengths=np.concatenate(lengths),
        placement=placement,
        tasks=Tasks.concatenate(tasks),
        notes=tuple(note for plan in plans if plan is not None for note in plan.notes),
    )
