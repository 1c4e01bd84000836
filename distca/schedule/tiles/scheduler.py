"""The default scheduler: placement and two-dimensional tiles together.

**Objective.** With the tolerance `t` no server computes more than `(1 + t)` times the mean load
(predicted seconds by the measured profile, over the server's speed), and among such plans the
*busiest link* should be busy for as short as possible: time is the most that any rank computes,
sends or receives, not a sum. A server below the mean costs no time, so none is filled for its own
sake. Minimising this exactly is bin packing with several bounds, NP-hard; this scheduler is a
heuristic, whose plans are measured exactly, as all plans are.

**Steps.**

1. *Placement* (`packing.py`), if it is free: short documents whole, long ones in mirrored slices
   on as few ranks as can take them, and ranks filled up with short documents, so that they are
   nearly balanced although each computes only its own queries.
2. *Grids* (`grid.py`): a document on many ranks is cut in queries and keys.
3. *Moves* (`moves.py`): tiles go from servers above the tolerance to others, the cheapest first.
   With a given placement (the paper's, or that of pooled stages) steps 2 and 3 are all.

Steps 1 to 3 are done for a few settings of the packing's two parameters, and on few ranks for the
paper's placement, too. The best plan is kept: one within the tolerance before any other, then the
one whose busiest link is free first. The number of settings depends on the number of ranks alone,
so that all ranks choose the same plan. In more than 1,024 ranks each small server pool gets one
setting: thousands of pools are planned in turn.

**Bounds.** With `max_buffer_bytes` no server receives more for a layer's forward pass: where it
would at home, queries go to keys (`recv_bound.py`), and moves respect the bound. If the bound
forbids the tolerance the plan's notes say so; if no plan keeps to the bound an error is raised.

**Complexity.** Sorting the documents, then near-constant work for each document longer than 1/32 of
a rank's tokens or load (at most 32 for each rank), each slice and each move. The result is
deterministic: ties go to the lower number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.cost.volume import PlanBytes, plan_bytes
from distca.plan import Mask, Placement, Plan, place_in_turn
from distca.plan.span import Floats, Int64s
from distca.schedule.base import (
    BufferBoundError,
    ScheduleConfig,
    document_loads,
    level_load,
    relative_loads,
    server_loads,
    shared_prefixes,
)
from distca.schedule.tiles.grid import initial_tasks
from distca.schedule.tiles.moves import balance
from distca.schedule.tiles.packing import Packing, place_balanced
from distca.schedule.tiles.recv_bound import bound_recv_bytes
from distca.schedule.tiles.tree_line import TreeLine

_SETTINGS = ((0.4, 0.3), (0.4, 0.9), (0.25, 0.9), (0.4, 0.6))
"""Settings of a packing: `base_share`, and the slack as a part of the tolerance; the first one is
the best most often."""
_FEW_RANKS = 32
"""Most ranks for which all settings are tried, otherwise only the first."""
_FEW_IN_ALL = 1024
"""Most ranks of all server pools together for which all settings are tried."""
_CHUNKS, _MORE_CHUNKS = (1, 2, 3, 4), (6, 8)
"""Chunks of trees on each rank that are tried, and those that are tried on few ranks, too."""
_ROUNDING = 1e-9
"""Allowance for the rounding of sums of loads."""


@dataclass(frozen=True)
class _Candidate:
    """A plan, measured as far as it is compared."""

    plan: Plan
    config: ScheduleConfig

    @cached_property
    def imbalance(self) -> float:
        return _imbalance(self.plan, self.config)

    @cached_property
    def _moved(self) -> PlanBytes:
        return plan_bytes(self.plan, self.config.shape)

    @property
    def cost(self) -> tuple[float, int]:
        """Seconds that the busiest link is busy in the forward pass, and bytes of all links."""
        forward = self._moved.forward()
        return float(self.config.links.busy_seconds(forward).max()), forward.total

    @property
    def most_received(self) -> int:
        return int(self._moved.messages["dispatch"].received().max())


@dataclass(frozen=True)
class _Family:
    """Documents that are planned together.

    Attributes:
        lengths: tokens of each, with those of its parent, int64 `[documents]`.
        mask: attention mask of all.
        parents: see `Plan.parents`.
        prefix: first tokens of each that have no queries, most often its parent's, int64
            `[documents]`, or None.
        query_shift: see `Plan.query_shift`.
    """

    lengths: Int64s
    mask: Mask
    parents: Int64s | None = None
    prefix: Int64s | None = None
    query_shift: Int64s | None = None

    @property
    def own_lengths(self) -> Int64s:
        """Tokens of each that have queries."""
        return self.lengths if self.prefix is None else self.lengths - self.prefix

    @cached_property
    def line(self) -> TreeLine | None:
        """The documents as trees; None: no document has a parent."""
        if self.parents is None or self.prefix is None or not self.prefix.any():
            return None
        return TreeLine.of(self.own_lengths, self.prefix, self.parents, self.query_shift)


class TilesScheduler:
    """The scheduler `tiles`, as the module describes it."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def plan(
        self,
        lengths: Int64s,
        capacities: Int64s,
        mask: Mask,
        parents: Int64s | None = None,
        prefix: Int64s | None = None,
        query_shift: Int64s | None = None,
        cached: Placement | None = None,
    ) -> Plan:
        """Makes a plan as `Scheduler.plan` says.

        Args:
            lengths: tokens of each document, with those of its parent, int64 `[documents]`.
            capacities: tokens with queries that each rank owns, int64 `[ranks]`.
            mask: attention mask of all documents; it counts a parent's tokens, too.
            parents: see `Plan.parents`; None: no document has any.
            prefix: tokens of each document that are its parent's, int64 `[documents]`; None: all
                that the parent has.
            query_shift: see `Plan.query_shift`.
            cached: placement of the prefixes of documents without parent; None: they have none.

        Raises:
            BufferBoundError: no plan keeps to `max_buffer_bytes`.
            ValueError: see `shared_prefixes`; or there are parents and `max_buffer_bytes`.
        """
        family = self._family(lengths, mask, parents, prefix, query_shift)
        config, lengths, line = self._config, family.own_lengths, family.line
        loads = document_loads(family.lengths, mask, config.cost_model, family.prefix, query_shift)
        if line is not None:
            # Trees are packed as documents are.
            lengths, loads = line.of_trees(lengths).astype(np.int64), line.of_trees(loads)
        speeds = config.speeds_of(len(capacities))
        packing = Packing(
            capacities=capacities,
            targets=float(loads.sum()) * speeds / float(speeds.sum()),
            base_share=0.0,
            slack=0.0,
            overfill=math.inf,
            ranks_per_node=config.links.ranks_per_node,
            block=config.block,
        )
        placements = []
        ranks = len(capacities)
        few = ranks <= _FEW_RANKS and ranks * config.pools <= _FEW_IN_ALL
        for base_share, slack in _SETTINGS if few else _SETTINGS[:1]:
            setting = replace(
                packing,
                base_share=base_share,
                slack=slack * config.tolerance,
                overfill=(1 - slack) * config.tolerance,
            )
            placements.append(place_balanced(lengths, loads, setting))
        if line is not None:
            numbers = _CHUNKS + _MORE_CHUNKS * few
            placements = [line.of_nodes(each) for each in placements]
            placements += [line.chunks(capacities, speeds, mask, each) for each in numbers]
        placements = _different(placements)
        if cached is not None:
            placements = [Placement.concatenate([each, cached]) for each in placements]
        found = [self._candidate(family, each) for each in placements]
        bound = config.max_buffer_bytes
        too_much = bound is not None and all(c.most_received > bound for c in found)
        if line is None and (too_much or few):
            # On few ranks the order of the documents may happen to be balanced.
            in_turn = place_in_turn(lengths, capacities)
            found.append(self._candidate(family, in_turn))
        if too_much:
            # Keeps documents whole wherever there is room for their tokens.
            whole = place_balanced(lengths, loads, packing)
            found.append(self._candidate(family, whole))
        return self._best(found)

    def schedule(
        self,
        lengths: Int64s,
        placement: Placement,
        mask: Mask,
        parents: Int64s | None = None,
        prefix: Int64s | None = None,
        query_shift: Int64s | None = None,
    ) -> Plan:
        """Makes a plan as `Scheduler.schedule` says; the other arguments are those of `plan`.

        Raises:
            BufferBoundError: no plan with this placement keeps to `max_buffer_bytes`.
            ValueError: as `plan`.
        """
        family = self._family(lengths, mask, parents, prefix, query_shift)
        return self._best([self._candidate(family, placement)])

    def _family(
        self,
        lengths: Int64s,
        mask: Mask,
        parents: Int64s | None,
        prefix: Int64s | None,
        query_shift: Int64s | None,
    ) -> _Family:
        lengths = np.asarray(lengths, dtype=np.int64)
        if parents is None:
            return _Family(lengths, mask)
        parents = np.asarray(parents, dtype=np.int64)
        prefix = shared_prefixes(lengths, parents, prefix)
        if self._config.max_buffer_bytes is not None:
            raise ValueError("documents with parents are not planned with max_buffer_bytes")
        return _Family(lengths, mask, parents, prefix, query_shift)

    def _candidate(self, family: _Family, placement: Placement) -> _Candidate:
        """Makes a plan with a placement."""
        config, prefix, shift = self._config, family.prefix, family.query_shift
        queries = placement
        if prefix is not None:
            queries = placement.select(placement.start >= prefix[placement.document])
        tasks = initial_tasks(
            family.lengths, queries, family.mask, config.shape, config.block, prefix, shift
        )
        plan = Plan(
            family.lengths,
            placement,
            tasks,
            family.mask,
            config.block,
            scheduler="tiles",
            cached_prefix=prefix,
            parents=family.parents,
            query_shift=shift,
        )
        if config.max_buffer_bytes is not None:
            plan = bound_recv_bytes(plan, config.shape, config.max_buffer_bytes)
        return _Candidate(move_tiles(plan, config), config)

    def _best(self, found: list[_Candidate]) -> Plan:
        config = self._config
        bound = config.max_buffer_bytes
        allowed = [c for c in found if bound is None or c.most_received <= bound]
        if not allowed:
            least = min(candidate.most_received for candidate in found)
            error = BufferBoundError(
                f"no plan for these documents keeps to {bound:,} buffer bytes: a server receives "
                f"up to {least:,} in the one that comes closest. Allow more bytes (`distca plan "
                "--max-buffer-bytes` finds how many), or cut documents shorter"
            )
            error.least = least
            raise error
        limit = 1 + config.tolerance + _ROUNDING
        best = allowed[0]
        if len(allowed) > 1:
            best = min(allowed, key=lambda c: (max(c.imbalance, limit), c.cost))
        notes = self._notes(best)
        return replace(best.plan, notes=notes) if notes else best.plan

    def _notes(self, chosen: _Candidate) -> tuple[str, ...]:
        config = self._config
        if chosen.imbalance <= 1 + config.tolerance + _ROUNDING:
            return ()
        why = f"no tile cut on blocks of {config.block} tokens brings it closer"
        if config.max_buffer_bytes is not None:
            why += f" within {config.max_buffer_bytes:,} buffer bytes"
        return (
            f"the busiest server has {chosen.imbalance:.3f} times the mean load, above the "
            f"tolerance of {config.tolerance}: {why}",
        )


def _different(placements: Sequence[Placement]) -> list[Placement]:
    """Returns the first of equal placements: settings often agree on few ranks."""
    found: dict[bytes, Placement] = {}
    for each in placements:
        columns = np.stack([each.document, each.start, each.end, each.rank])
        found.setdefault(columns.tobytes(), each)
    return list(found.values())


def move_tiles(
    plan: Plan,
    config: ScheduleConfig,
    busy: Floats | None = None,
    pools: Int64s | None = None,
    sources: Int64s | None = None,
) -> Plan:
    """Moves tiles from servers above the tolerance to others, if there are any.

    Args:
        plan: a valid plan.
        config: configuration of the scheduler.
        busy: seconds in which each server computes something else, which cannot move, `[ranks]`,
            or None.
        pools: number of each server's pool, from 0 on, int64 `[ranks]`: tiles move inside a pool
            alone. None: there is one.
        sources: rank that sends a document's rows, int64 `[documents]`; None: the giver does.
    """
    if pools is None and _imbalance(plan, config, busy) <= 1 + config.tolerance:
        return plan
    moved = plan_bytes(plan, config.shape)
    tasks = balance(
        plan,
        config,
        config.links.busy_seconds(moved.forward()),
        moved.messages["dispatch"].received().astype(np.float64),
        busy,
        pools,
        sources,
    )
    return replace(plan, tasks=tasks)


def _imbalance(plan: Plan, config: ScheduleConfig, busy: Floats | None = None) -> float:
    """Returns the busiest server's time over the time if all were busy equally long."""
    servers = plan.world_size
    loads = server_loads(plan.tasks, plan.mask, servers, config.cost_model)
    speeds = config.speeds_of(servers)
    if busy is None:
        return float(relative_loads(loads, speeds).max())
    level = level_load(float(loads.sum()), speeds, busy)
    return float((loads / speeds + busy).max()) / level if level else 1.0
