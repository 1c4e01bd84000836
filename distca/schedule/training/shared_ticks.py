"""Shared ticks: one plan for all stages of a pipeline that work at the same time (Section 4.1).

Servers with less linear work take more of a tick's attention (`tick_speeds.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from distca.plan import LayerMasks, Placement, Plan, Tasks, validate_plan
from distca.plan.span import Int64s
from distca.schedule.base import ScheduleConfig
from distca.schedule.chunks import OverChunks
from distca.schedule.schedulers import BALANCING, make_scheduler
from distca.schedule.tiles.scheduler import move_tiles
from distca.schedule.training.nano_batches import NanoPlan, SplitDocument, with_cached_prefixes
from distca.schedule.training.planned_batch import (
    PlannedMicroBatch,
    PlannedTick,
    servers_of_pools,
)
from distca.schedule.training.tick_schedule import Tick
from distca.schedule.training.tick_speeds import AtHome, LinearWork, load_of_a_pair, tick_speeds


@dataclass(frozen=True)
class TickPlanner:
    """Plans the ticks of global batches over the servers of all stages.

    Attributes:
        servers: number of each data-parallel rank of each stage among the servers, int64
            `[stages, data-parallel ranks]`.
        world_size: number of all servers, including those that hold no model.
        config: configuration of the schedulers that plan a tick.
        masks: masks of a model chunk's layers.
        scheduler: name of the scheduler.
        shared: whether tasks may leave their stage.
        linear_work: linear layers of the model, where servers with less of them take more
            attention; None: attention alone counts.
        chunks: number of model chunks of each stage.
        checks: whether plans are validated.
        pool_planners: planner of each server pool; empty: there are none.
    """

    servers: Int64s
    world_size: int
    config: ScheduleConfig
    masks: LayerMasks
    scheduler: str
    shared: bool
    linear_work: LinearWork | None
    chunks: int
    checks: bool
    pool_planners: tuple[TickPlanner, ...] = ()

    def ticks(
        self, micro_batches: Sequence[PlannedMicroBatch], ticks: Sequence[Tick]
    ) -> tuple[PlannedTick, ...]:
        """Plans ticks. Those that run the same micro-batches share their plans.

        Args:
            micro_batches: all micro-batches of the global batch.
            ticks: some or all of its ticks.
        """
        together: dict[tuple[bool, bool, tuple[int | None, ...]], tuple[tuple[Plan, ...], int]] = {}
        planners = (*self.pool_planners, self)
        at_home = [AtHome(p.servers, p.world_size, p.config.cost_model) for p in planners]
        planned = []
        for tick in ticks:
            running = tuple(None if work is None else work.micro_batch for work in tick.work)
            ends = tick.ends_model(self.chunks)
            # Without these two, what the last stage has besides makes no difference.
            key = (
                ends and self.linear_work is not None,
                ends and self.masks.of_last_stage > 0,
                running,
            )
            if key not in together:
                stages = [None if number is None else micro_batches[number] for number in running]
                together[key] = self._plans(stages, *key[:2], at_home), len(together)
            planned.append(PlannedTick(tick, *together[key]))
        return tuple(planned)

    def _plans(
        self,
        stages: Sequence[PlannedMicroBatch | None],
        counts_head: bool,
        ends: bool,
        at_home: Sequence[AtHome],
    ) -> tuple[Plan, ...]:
        """Makes a tick's plans, with each mask in turn.

        Args:
            stages: micro-batch of each stage; None: the stage is idle.
            counts_head: whether the last stage's output layer counts when attention is shared out.
            ends: whether the last stage also runs layers that it alone has. If not, what stands for
                their plans is not run.
            at_home: what ranks compute if no task leaves its stage, of each server pool, and of
                all ranks.
        """
        # A wide micro-batch has no pools. It is in no pipeline.
        if self.pool_planners and all(each is None or each.pools for each in stages):
            of_pools = [
                planner._plans(
                    [None if each is None else each.pools[number] for each in stages],
                    counts_head,
                    ends,
                    [at_home[number]],
                )
                for number, planner in enumerate(self.pool_planners)
            ]
            servers = servers_of_pools(self.servers, len(of_pools), self.world_size)
            return tuple(
                side_by_side(plans, servers, self.world_size)
                for plans in zip(*of_pools, strict=True)
            )
        of_masks = [None if stage is None else (stage.plans, *stage.others) for stage in stages]
        found: list[tuple[Plan, ...]] = []
        of_all = len(self.masks.of_all_stages.masks)
        for number in range(len(self.masks.masks)):
            each = [None if plans is None else plans[number] for plans in of_masks]
            if number >= of_all and not ends:
                found.append(found[0])
                continue
            if number >= of_all:
                each[:-1] = [None] * (len(each) - 1)
            found.append(self._plans_with_a_mask(each, counts_head, at_home[-1]))
        return tuple(itertools.chain.from_iterable(found))

    def _plans_with_a_mask(
        self, stages: Sequence[Sequence[NanoPlan] | None], counts_head: bool, at_home: AtHome
    ) -> tuple[Plan, ...]:
        """Makes a tick's plans with one mask from the plans of each stage."""
        config = self._config_of_tick(stages, counts_head, at_home)
        plans = join_nano_batches(
            stages,
            self.servers,
            make_scheduler(self.scheduler, config) if self.shared else None,
            partial(move_tiles, config=config) if self.scheduler in BALANCING else None,
            self.world_size,
        )
        for plan in plans if self.checks else ():
            # Any other plan is a micro-batch's own, which was validated.
            if len(stages) > 1 or self.shared or plan.cached_prefix is not None:
                validate_plan(plan)
        return plans

    def _config_of_tick(
        self, stages: Sequence[Sequence[NanoPlan] | None], counts_head: bool, at_home: AtHome
    ) -> ScheduleConfig:
        """Returns the configuration with the speeds by which a tick's attention is shared out."""
        config, work = self.config, self.linear_work
        if work is None:
            return config
        attention, tokens = at_home.count(stages)
        pairs = tokens.astype(np.float64) * work.layer
        if counts_head:
            pairs[self.servers[-1]] += tokens[self.servers[-1]] * work.head
        speeds = tick_speeds(
            attention, pairs * load_of_a_pair(config.cost_model), config.speeds_of(self.world_size)
        )
        return replace(config, server_speeds=tuple(speeds.tolist()))


def join_stages(
    stages: Sequence[NanoPlan | None],
    servers: Int64s,
    scheduler: OverChunks | None = None,
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
    lengths, placement, mask = together.lengths, together.placement, together.mask
    if together.parents is None:
        plan = scheduler.schedule(lengths, placement, mask)
    else:
        family = together.parents, together.cached_prefix, together.query_shift
        plan = scheduler.schedule(lengths, placement, mask, *family)
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


def join_nano_batches(
    stages: Sequence[Sequence[NanoPlan] | None],
    servers: Int64s,
    scheduler: OverChunks | None = None,
    move: Callable[[Plan], Plan] | None = None,
    world_size: int | None = None,
) -> tuple[Plan, ...]:
    """Makes the plans of a tick, one for each nano-batch. All other arguments are those of
    `join_stages`.

    Args:
        stages: plans of the nano-batches of each stage; None: the stage is idle.
        servers: number of each rank among the servers of all stages.
        scheduler: shares all stages' tasks out over all servers, or None.
        move: moves tasks that attend to cached prefixes, or None.
        world_size: number of all servers, or None.
    """
    nano_batches = max(len(stage) for stage in stages if stage is not None)
    return tuple(
        join_stages(
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
    lengths, cached_prefixes, placements, tasks, parents, shifts = [], [], [], [], [], []
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
        if plan.parents is not None:
            parents.append(np.where(plan.parents < 0, -1, plan.parents + first_document))
        if plan.query_shift is not None:
            shifts.append(plan.query_shift)
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
    assert len(parents) in (0, len(working)), "plans with parents beside plans without"
    assert len(shifts) in (0, len(working)), "plans with shifts beside plans without"
    crosses = any(plan.cached_prefix is not None for plan in working)
    return replace(
        working[0],
        lengths=np.concatenate(lengths),
        placement=Placement.concatenate(placements),
        tasks=Tasks.concatenate(tasks),
        notes=tuple(note for plan in working for note in plan.notes),
        cached_prefix=np.concatenate(cached_prefixes) if crosses else None,
        parents=np.concatenate(parents) if parents else None,
        query_shift=np.concatenate(shifts) if shifts else None,
    )
