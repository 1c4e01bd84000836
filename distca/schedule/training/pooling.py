"""Pooling: one plan for all stages of a pipeline that work at the same time (Section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from distca.plan import Placement, Plan, Tasks
from distca.plan.span import Int64s
from distca.schedule.base import Scheduler
from distca.schedule.training.nano_batches import NanoPlan, SplitDocument, with_cached_prefixes


def pool(
    stages: Sequence[NanoPlan | None],
    servers: Int64s,
    scheduler: Scheduler | None = None,
    move: Callable[[Plan], Plan] | None = None,
    world_size: int | None = None,
) -> Plan:
    """Makes the plan of a tick, in which each stage runs a micro-batch of its own or is idle.

    Placements stay: a token is on the same data-parallel rank in every stage.

    Args:
        stages: plan of each stage over its own ranks; None: the stage is idle. All plans have the
            same mask and block, and at least one is not None.
        servers: number of each rank among the servers of all stages, int64 `[stages, ranks]`.
        scheduler: shares all stages' tasks out over all servers, idle stages' included; None: every
            stage keeps its own plan.
        move: moves tasks that attend to cached prefixes, which schedulers don't know; None: these
            stay with the owners of their queries.
        world_size: number of all servers, including those that no stage owns; None: those in
            `servers`.

    Returns:
        A plan over all servers. Its documents are those of stage 0, then of stage 1, and so on.
    """

    def with_earlier(plan: Plan, split_documents: Sequence[SplitDocument]) -> Plan:
        extended = with_cached_prefixes(plan, split_documents)
        return extended if move is None or not split_documents else move(extended)

    if world_size is None:
        world_size = int(servers.size)
    if len(stages) == 1 and stages[0] is not None and world_size == servers.size:
        only = stages[0]
        return with_earlier(only.plan, only.split_documents)
    if scheduler is None:
        own = [None if s is None else with_earlier(s.plan, s.split_documents) for s in stages]
        return side_by_side(own, servers, world_size)
    together = side_by_side([None if s is None else s.plan for s in stages], servers, world_size)
    plan = scheduler.schedule(together.lengths, together.placement, together.mask)
    split_documents, first_document = [], 0
    for stage, ranks in zip(stages, servers, strict=True):
        if stage is None:
            continue
        for split in stage.split_documents:
            earlier = split.earlier
            earlier = replace(earlier, rank=ranks[earlier.rank], world_size=world_size)
            split_documents.append(SplitDocument(first_document + split.document, earlier))
        first_document += len(stage.plan.lengths)
    return with_earlier(plan, split_documents)


def pool_nano_batches(
    stages: Sequence[Sequence[NanoPlan] | None],
    servers: Int64s,
    scheduler: Scheduler | None = None,
    move: Callable[[Plan], Plan] | None = None,
    world_size: int | None = None,
) -> tuple[Plan, ...]:
    """Makes the plans of a tick, one for each nano-batch. All other arguments are those of `pool`.

    Args:
        stages: plans of the nano-batches of each stage; None: the stage is idle.
        servers: number of each rank among the servers of all stages.
        scheduler: shares all stages' tasks out over all servers, or None.
        move: moves tasks that attend to cached prefixes, or None.
        world_size: number of all servers, or None.
    """
    nano_batches = max(len(stage) for stage in stages if stage is not None)
    return tuple(
        pool(
            [None if s is None else s[number] for s in stages], servers, scheduler, move, world_size
        )
        for number in range(nano_batches)
    )


def side_by_side(plans: Sequence[Plan | None], servers: Int64s, world_size: int) -> Plan:
    """Joins plans into one, each on its own servers.

    Args:
        plans: plan of each stage, or server pool, over its own ranks; None: it is idle.
        servers: number of each of these ranks among all servers, int64 `[plans, ranks]`.
        world_size: number of all servers.
    """
    lengths, cached_prefixes, placements, tasks = [], [], [], []
    first_document = 0
    working = [plan for plan in plans if plan is not None]
    for plan, ranks in zip(plans, servers, strict=True):
        if plan is None:
            continue
        placement, own = plan.placement, plan.tasks
        lengths.append(plan.lengths)
        cached_prefixes.append(
            np.zeros_like(plan.lengths) if plan.cached_prefix is None else plan.cached_prefix
        )
        placements.append(
            Placement(
                placement.document + first_document,
                placement.start,
                placement.end,
                ranks[placement.rank],
                world_size,
            )
        )
        tasks.append(replace(own, document=own.document + first_document, server=ranks[own.server]))
        first_document += len(plan.lengths)
    crosses = any(plan.cached_prefix is not None for plan in working)
    return replace(
        working[0],
        lengths=np.concatenate(lengths),
        placement=Placement.concatenate(placements),
        tasks=Tasks.concatenate(tasks),
        notes=tuple(note for plan in working for note in plan.notes),
        cached_prefix=np.concatenate(cached_prefixes) if crosses else None,
    )
