"""A global batch, planned once: from the documents of its windows to the plans of its ticks.

Training and simulator share this code, so that the simulated plans are those that run. The plans
are a pure function of the documents and the options, the same on every rank:

1. documents are shared out over the micro-batches, if placement is free, or over chains of
   micro-batches, which are then cut (`micro_batches.py`);
2. each micro-batch is planned over the ranks of a stage, as two nano-batches (`nano_batches.py`) or
   whole, with the placement of the widest mask. Each server pool (`server_pools.py`) plans its own;
3. in each tick (`tick_schedule.py`) the plans of all stages that work become one plan over the
   servers of all stages (`shared_ticks.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from distca.plan import LayerMasks, Mask, Plan, place_in_turn, place_sequentially, validate_plan
from distca.plan.span import Int64s
from distca.schedule.base import ScheduleConfig, Scheduler, document_loads
from distca.schedule.schedulers import BALANCING, make_scheduler
from distca.schedule.tiles.scheduler import TilesScheduler
from distca.schedule.training.micro_batches import cut_chain, share_out
from distca.schedule.training.nano_batches import NanoPlan, plan_chain
from distca.schedule.training.planned_batch import (
    Documents,
    PlannedGlobalBatch,
    PlannedMicroBatch,
    PlannedTick,
    servers_of_pools,
)
from distca.schedule.training.server_pools import ServerPools
from distca.schedule.training.shared_ticks import TickPlanner
from distca.schedule.training.tick_schedule import Tick, TickSchedule, chain_sizes, tick_schedule
from distca.schedule.training.tick_speeds import LinearWork, load_of_a_pair
from distca.schedule.training.tree_halves import plan_tree_halves
from distca.schedule.training.trees import DocumentTrees, plan_trees

# All global batches of a job have the same ticks, and a search often tries the same schedules.
_tick_schedule = lru_cache(maxsize=256)(tick_schedule)


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of a job with `--distca`, as its flags of the same names set them.

    Attributes:
        scheduler: a name of `distca.schedule.SCHEDULERS`.
        free_placement: whether the scheduler chooses the placement, and documents are shared out
            over the micro-batches of a global batch; otherwise documents are placed in turn.
        ping_pong: whether micro-batches run as two nano-batches.
        pool_stages: whether stages share their attention servers.
        chunks: model chunks (virtual stages) of each stage.
        max_in_flight: most micro-batches that a stage keeps for their backward pass; None: no
            bound.
        forward_only: whether the job has no backward ticks, as in an evaluation.
        chain: micro-batches in turn that share documents; 1: none crosses a micro-batch's end.
        pool_size: ranks of a server pool (`server_pools.py`); None: there are no pools, all ranks
            share attention, and micro-batches have exactly as many tokens as each other.
        wide_documents: tokens from which on all ranks share a document, with server pools; None:
            no document is shared by all.
        token_pairs: visible pairs whose attention takes as long as the linear layers of a token, in
            a layer, both passes: by these documents are assigned to pools; None: as many as take
            equally many operations.
    """

    scheduler: str = "tiles"
    free_placement: bool = True
    ping_pong: bool = True
    pool_stages: bool = True
    chunks: int = 1
    max_in_flight: int | None = None
    forward_only: bool = False
    chain: int = 1
    pool_size: int | None = None
    wide_documents: int | None = None
    token_pairs: float | None = None

    def tick_schedule(self, micro_batches: int, stages: int) -> TickSchedule:
        """Returns the tick schedule of a global batch."""
        return _tick_schedule(
            micro_batches,
            stages,
            self.chunks,
            self.max_in_flight,
            self.forward_only,
            self.chain,
        )


@dataclass(frozen=True)
class GlobalBatchPlanner:
    """Plans the global batches of a job.

    Attributes:
        servers: number of each data-parallel rank of each stage among the servers, int64
            `[stages, data-parallel ranks]`.
        config: configuration of the schedulers that plan over all servers.
        options: options of the job.
        masks: masks of a model chunk's layers.
        dedicated: number of servers that hold no model; they are numbered after all others.
        checks: whether plans are validated, and refused if a rank has no tokens; needed wherever
            plans are run.
        linear_work: linear layers of the model, with which `tiles` shares out the attention of
            ticks by the time that servers have for it (`tick_speeds.py`); None: attention alone
            counts.
        row_multiple: number that divides the tokens of each rank's nano-batch, which sequence
            parallelism divides.

    Raises:
        ValueError: the options' server pools cannot be had.
    """

    servers: Int64s
    config: ScheduleConfig
    options: ExecutionOptions
    masks: LayerMasks = field(default_factory=LayerMasks)
    dedicated: int = 0
    checks: bool = True
    linear_work: LinearWork | None = None
    row_multiple: int = 1

    def __post_init__(self) -> None:
        options, size = self.options, self.options.pool_size
        if size is None:
            return
        if size < 1 or self.ranks % size:
            raise ValueError(
                f"server pools of {size} ranks do not divide {self.ranks} data-parallel ranks: "
                "give a divisor"
            )
        for name, found in (
            (
                "wide documents in a pipeline",
                options.wide_documents is not None and self.stages > 1,
            ),
            ("chains of micro-batches", options.chain > 1),
            ("a given placement", not options.free_placement),
            (f"the scheduler {options.scheduler}", options.scheduler not in BALANCING),
            ("an unknown size of linear layers", self._token_pairs is None),
        ):
            if found:
                raise ValueError(f"server pools do not go together with {name}")
        pools = self.ranks // size
        if self.dedicated % pools:
            raise ValueError(
                f"{self.dedicated} dedicated servers cannot be divided among {pools} server pools: "
                f"give a multiple of {pools}"
            )

    @property
    def stages(self) -> int:
        return len(self.servers)

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks of a stage."""
        return int(self.servers.shape[1])

    @property
    def world_size(self) -> int:
        """Number of all servers."""
        return int(self.servers.size) + self.dedicated

    def plan(self, incoming: Sequence[Documents]) -> PlannedGlobalBatch:
        """Plans a global batch.

        Args:
            incoming: documents of each micro-batch, or of each chain of them, in the order of the
                stream. All micro-batches have the same number of tokens, divisible by the
                data-parallel ranks (and the two nano-batches); with server pools any number.

        Raises:
            ValueError: micro-batches differ in size or don't divide, or a scheduler refuses.
        """
        return self.with_ticks(self.micro_batches(incoming))

    def with_ticks(
        self, micro_batches: Sequence[PlannedMicroBatch], schedule: TickSchedule | None = None
    ) -> PlannedGlobalBatch:
        """Plans the ticks of planned micro-batches.

        Args:
            micro_batches: all micro-batches of a global batch.
            schedule: ticks of as many micro-batches; None: those of the options.
        """
        schedule = schedule or self.options.tick_schedule(len(micro_batches), self.stages)
        ticks = self.ticks(micro_batches, schedule.ticks)
        size = None if self._server_pools is None else self._server_pools.size
        return PlannedGlobalBatch(
            schedule, self.servers, tuple(micro_batches), ticks, self.masks, size
        )

    def share_out(self, incoming: Sequence[Documents]) -> list[Documents]:
        """Shares documents out over the micro-batches, or chains, if placement is free.

        Loads become nearly equal. A last chain that is shorter keeps its documents.

        Args:
            incoming: documents of each micro-batch or chain, as for `plan`.
        """
        equal = [each for each in incoming if each.micro_batches == incoming[0].micro_batches]
        if len(equal) == 1 or not self.options.free_placement:
            return list(incoming)
        lengths = np.concatenate([documents.lengths for documents in equal])
        starts = np.concatenate([documents.starts for documents in equal])
        windows = np.repeat(np.arange(len(equal)), [len(documents.lengths) for documents in equal])
        trees = None
        if equal[0].trees is not None:
            trees = DocumentTrees.joined([each.trees for each in equal if each.trees is not None])
        loads = self._loads(lengths) if trees is None else self._loads_of_trees(trees)
        shared = share_out(lengths, loads, windows)
        together = Documents(lengths, starts, (), equal[0].micro_batches, trees)
        return [together.select(np.flatnonzero(shared == n)) for n in range(len(equal))] + list(
            incoming[len(equal) :]
        )

    def micro_batches(self, incoming: Sequence[Documents]) -> list[PlannedMicroBatch]:
        """Plans the micro-batches of a global batch.

        Args:
            incoming: documents of each micro-batch or chain, as for `plan`.

        Raises:
            ValueError: micro-batches differ in size or don't divide, or a scheduler refuses.
        """
        sizes = [documents.micro_batches for documents in incoming]
        assert sizes == chain_sizes(sum(sizes), self.options.chain), f"chains of {sizes}"
        if self._server_pools is not None:
            return self.plan_assigned(self.assign(incoming))
        tokens = {int(d.lengths.sum()) / d.micro_batches for d in incoming}
        parts = self.ranks * (2 if self.options.ping_pong else 1)
        if len(tokens) != 1 or next(iter(tokens)) % parts:
            found = ", ".join(f"{each:g}" for each in sorted(tokens))
            raise ValueError(
                f"micro-batches of {found} tokens: they must all hold the same number, a multiple "
                f"of {parts}"
            )
        planned: list[PlannedMicroBatch] = []
        for documents in self.share_out(incoming):
            planned += self._plan_chain(documents, len(planned))
        return planned

    def plan_assigned(self, parts: Sequence[Sequence[Documents]]) -> list[PlannedMicroBatch]:
        """Plans micro-batches, each pool's documents over its own ranks.

        Args:
            parts: documents of each pool in each micro-batch, as `assign` returns them.
        """
        assert self._server_pools is not None
        planned = []
        for number, of_pools in enumerate(parts):
            if len(of_pools) == 1 < self._server_pools.number:
                planned += self._plan_chain(of_pools[0], number)
                continue
            each = zip(self._pool_planners, of_pools, strict=True)
            made = [planner._plan_chain(documents, number)[0] for planner, documents in each]
            planned.append(self._server_pools.join(made))
        return planned

    def assign(self, incoming: Sequence[Documents]) -> list[list[Documents]]:
        """Assigns documents to the server pools: see `ServerPools.assign`.

        Args:
            incoming: documents of each micro-batch, as for `plan`.
        """
        assert self._server_pools is not None
        lengths = np.concatenate([documents.lengths for documents in incoming])
        # A micro-batch is on the same ranks in all stages.
        speeds = self.config.speeds_of(self.world_size)[self.servers].mean(axis=0)
        return self._server_pools.assign(incoming, self._work(lengths), speeds)

    def ticks(
        self, micro_batches: Sequence[PlannedMicroBatch], ticks: Sequence[Tick]
    ) -> tuple[PlannedTick, ...]:
        """Plans ticks over all servers.

        Args:
            micro_batches: all micro-batches of the global batch.
            ticks: some or all of its ticks.
        """
        return self._tick_planner.ticks(micro_batches, ticks)

    def _plan_chain(self, documents: Documents, first: int) -> list[PlannedMicroBatch]:
        """Plans the micro-batches that share documents; often that is a single one.

        Args:
            documents: documents of all of them.
            first: number of the first one in the global batch.
        """
        options, lengths, count = self.options, documents.lengths, documents.micro_batches
        if documents.trees is not None:
            return [self._plan_trees(documents, documents.trees, range(first, first + 1))]
        whole = count == 1 and not options.ping_pong
        micro_batches = plan_chain(
            cut_chain(lengths, self._part_loads, count, not options.free_placement),
            lengths,
            self._part_loads,
            lambda own: self._plan_nano_batch(own, documents.window_sizes if whole else ()),
            options.ping_pong,
        )
        members = range(first, first + count)
        return [
            PlannedMicroBatch(
                tuple(
                    Documents(
                        pieces.lengths,
                        documents.stream_positions(pieces.document, pieces.start),
                        documents.window_sizes if whole else (),
                    )
                    for pieces in nano_batches
                ),
                plans,
                members,
                tuple(
                    plans
                    if mask == self.masks.masks[0]
                    else tuple(self._with_mask(nano, mask) for nano in plans)
                    for mask in self.masks.masks[1:]
                ),
            )
            for nano_batches, plans in micro_batches
        ]

    def _plan_trees(
        self, documents: Documents, trees: DocumentTrees, members: range
    ) -> PlannedMicroBatch:
        common = self._tree_scheduler, self.masks, self.ranks
        if self.options.ping_pong:
            halves, plans = plan_tree_halves(documents, self._loads_of_trees(trees), *common)
        else:
            halves = (documents.paths(),)
            plans = [(NanoPlan(plan),) for plan in plan_trees(trees, *common)]
        for nano in itertools.chain.from_iterable(plans) if self.checks else ():
            validate_plan(nano.plan)
        return PlannedMicroBatch(halves, plans[0], members, tuple(plans[1:]))

    def _part_loads(self, start: Int64s, end: Int64s) -> np.ndarray:
        """Returns the loads of parts of documents, whose queries see all tokens before them."""
        loads, later = self._loads(end), start > 0
        loads[later] -= self._loads(start[later])
        return loads

    def _plan_nano_batch(self, lengths: Int64s, window_sizes: tuple[int, ...] = ()) -> Plan:
        """Plans a nano-batch, or a whole micro-batch, over the ranks of a stage."""
        mask = self.masks.masks[0]
        tokens = int(lengths.sum()) // self.ranks
        capacities = np.full(self.ranks, tokens, dtype=np.int64)
        if self.options.free_placement:
            plan = self._scheduler.plan(lengths, capacities, mask)
        elif window_sizes:
            windows = np.split(lengths, np.cumsum(window_sizes)[:-1])
            placement = place_sequentially(windows, self.ranks, tokens // len(windows))
            plan = self._scheduler.schedule(lengths, placement, mask)
        else:
            plan = self._scheduler.schedule(lengths, place_in_turn(lengths, capacities), mask)
        if self.checks:
            validate_plan(plan)
            if not plan.placement.tokens_per_rank().all():
                raise ValueError(
                    f"{plan.scheduler} leaves a rank without tokens, which a model cannot train "
                    "on: use another --distca-scheduler"
                )
        return plan

    def _with_mask(self, nano: NanoPlan, mask: Mask) -> NanoPlan:
        """Returns the plan of the same tokens on the same ranks with another mask."""
        plan = self._scheduler.schedule(nano.plan.lengths, nano.plan.placement, mask)
        if self.checks:
            validate_plan(plan)
        return replace(nano, plan=plan)

    def _loads(self, lengths: Int64s) -> np.ndarray:
        """Returns the loads of documents, over the layers of the masks' pattern."""
        masks, cost_model = self.masks, self.config.cost_model
        each = [document_loads(lengths, mask, cost_model) for mask in masks.masks]
        return np.array(masks.counts()) @ np.stack(each)

    def _loads_of_trees(self, trees: DocumentTrees) -> np.ndarray:
        """Returns the loads of documents that are trees, as `_loads`, `[documents]`."""
        masks, cost_model = self.masks, self.config.cost_model
        each = [
            document_loads(trees.lengths, mask, cost_model, trees.prefix) for mask in masks.masks
        ]
        of_nodes = np.array(masks.counts()) @ np.stack(each)
        return np.bincount(trees.document, weights=of_nodes, minlength=len(trees.counts))

    def _work(self, lengths: Int64s) -> np.ndarray:
        """Returns the work of documents, attention and linear layers, in the unit of loads."""
        assert self._token_pairs is not None
        pair = load_of_a_pair(self.config.cost_model)
        layers = len(self.masks.pattern)
        work: np.ndarray = self._loads(lengths) + layers * self._token_pairs * pair * lengths
        return work

    @property
    def _token_pairs(self) -> float | None:
        if self.options.token_pairs is not None:
            return self.options.token_pairs
        # Half of the output layer counts there.
        linear = self.linear_work
        return None if linear is None else linear.layer + 2 * linear.head

    @cached_property
    def _server_pools(self) -> ServerPools | None:
        size = self.options.pool_size
        if size is None:
            return None
        multiple = size * self.row_multiple * (2 if self.options.ping_pong else 1)
        wide = self.options.wide_documents
        return ServerPools(size, self.ranks // size, multiple, wide)

    @cached_property
    def _pool_planners(self) -> tuple[GlobalBatchPlanner, ...]:
        """Planner of each server pool, over its own ranks; none: there are no pools."""
        if self._server_pools is None:
            return ()
        planners, pools = [], self._server_pools.number
        shape = self.stages, self._server_pools.size
        speeds = self.config.server_speeds
        for servers in servers_of_pools(self.servers, pools, self.world_size):
            mine = None if speeds is None else tuple(speeds[each] for each in servers)
            planners.append(
                replace(
                    self,
                    servers=np.arange(math.prod(shape), dtype=np.int64).reshape(shape),
                    config=replace(self.config, server_speeds=mine, pools=pools),
                    options=replace(self.options, pool_size=None),
                    dedicated=self.dedicated // pools,
                )
            )
        return tuple(planners)

    @cached_property
    def _stage_config(self) -> ScheduleConfig:
        """Configuration of the scheduler that plans over the ranks of a stage.

        A micro-batch has the same placement in all stages, so a rank has the mean speed of its
        servers.
        """
        if self.config.server_speeds is None:
            return self.config
        speeds = np.array(self.config.server_speeds)[self.servers].mean(axis=0)
        return replace(self.config, server_speeds=tuple(speeds.tolist()))

    @cached_property
    def _scheduler(self) -> Scheduler:
        return make_scheduler(self.options.scheduler, self._stage_config)

    @cached_property
    def _tree_scheduler(self) -> TilesScheduler:
        """Scheduler of documents that share tokens; a ValueError where options rule them out."""
        options = self.options
        for name, found in (
            (f"the scheduler {options.scheduler}", options.scheduler != "tiles"),
            ("a given placement", not options.free_placement),
            ("chains of micro-batches", options.chain > 1),
            ("server pools", options.pool_size is not None),
            ("a bound of buffers", self.config.max_buffer_bytes is not None),
            ("chunked attention", any(m.attention_chunk is not None for m in self.masks.masks)),
        ):
            if found:
                raise ValueError(f"documents that share tokens do not go together with {name}")
        return TilesScheduler(self._stage_config)

    @cached_property
    def _tick_planner(self) -> TickPlanner:
        options = self.options
        shared = (self.stages > 1 and options.pool_stages) or self.dedicated > 0
        # Without ping-pong no rank computes attention while others compute linear layers, so less
        # linear work frees no time for it. Not tried with dedicated servers.
        by_time = shared and not self.dedicated and options.ping_pong
        return TickPlanner(
            self.servers,
            self.world_size,
            self.config if shared else self._stage_config,
            self.masks,
            options.scheduler,
            shared,
            self.linear_work if by_time and options.scheduler == "tiles" else None,
            options.chunks,
            self.checks,
            tuple(planner._tick_planner for planner in self._pool_planners),
        )
