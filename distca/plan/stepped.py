"""A plan in steps, as inference runs it: rows travel step by step, and some may be dropped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distca.plan.kept import KeptKeys, find_kept_keys
from distca.plan.plan import Plan
from distca.plan.segments import Segments, find_segments
from distca.plan.span import Bools, Int64s, cut_at, distinct, expand_ranges, order_by


class StepSegments(NamedTuple):
    """The rows of one step of a plan.

    Attributes:
        q: query rows that servers need in the step, and who sends them.
        kv: key-value rows, likewise.
        outputs: the same query rows by their owners, to whom outputs return.
    """

    q: Segments
    kv: Segments
    outputs: Segments


class KeptRows(NamedTuple):
    """The number of each task's rows that stay, in each key-value head; the others are dropped.

    *Which* rows stay is chosen when the plan runs.

    Attributes:
        q: queries that stay, int64 `[tasks, kv_heads]`.
        kv: keys that stay, likewise.
    """

    q: Int64s
    kv: Int64s

    def select(self, selection: Int64s | Bools) -> KeptRows:
        """Returns those of the tasks that a boolean or an index array selects."""
        return KeptRows(self.q[selection], self.kv[selection])


@dataclass(frozen=True)
class SteppedPlan:
    """A plan whose tasks are in ordered *steps*. It runs forward only.

    The rows of a step travel while servers compute the step before, and the outputs of a step
    return while they compute the next. A row that a server needs in a step comes from a rank that
    needed it in the step before (a *relay*), else from its owner.

    Attributes:
        plan: placement and tasks. The tasks cover all visible pairs, before any are dropped.
        step: step of each task, int64 `[tasks]`.
        relays: whether ranks pass rows on; else all come from their owners. Where tasks drop rows
            there are no relays.
        gathers: whether each rank is sent all keys and values of its documents, those that none of
            its queries sees, too: an all-gather. Such a plan is a baseline, of one step.
        kept: rows of each task that stay; None: nothing is dropped.
    """

    plan: Plan
    step: Int64s
    relays: bool = True
    gathers: bool = False
    kept: KeptRows | None = None

    @staticmethod
    def at_once(plan: Plan) -> SteppedPlan:
        """Returns the plan in a single step."""
        return SteppedPlan(plan, np.zeros(len(plan.tasks), dtype=np.int64))

    @cached_property
    def steps(self) -> int:
        return int(self.step.max(initial=0)) + 1

    @property
    def drops(self) -> bool:
        """Whether rows may be dropped."""
        return self.kept is not None

    @property
    def in_steps(self) -> bool:
        """Whether it runs otherwise than its plan would, all at once and whole."""
        return self.steps > 1 or self.gathers or self.drops

    def select(self, selection: Int64s | Bools) -> SteppedPlan:
        """Returns the tasks that a boolean or an index array selects, in the same steps."""
        kept = None if self.kept is None else self.kept.select(selection)
        plan = replace(self.plan, tasks=self.plan.tasks[selection])
        return replace(self, plan=plan, step=self.step[selection], kept=kept)

    def of_kv_heads(self, heads: slice) -> SteppedPlan:
        """Returns the plan of some key-value heads, where rows of single heads may be dropped."""
        if self.kept is None:
            return self
        return replace(self, kept=KeptRows(self.kept.q[:, heads], self.kept.kv[:, heads]))

    def kept_pairs(self) -> Int64s:
        """Returns the pairs of each task that are computed in each key-value head, `[tasks,
        kv_heads]`: tasks that end on the diagonal keep all. Without drops there is one column."""
        tasks = self.plan.tasks
        pairs = tasks.pairs(self.plan.mask)[:, None]
        if self.kept is None:
            return pairs
        return np.where(tasks.ends_on_diagonal[:, None], pairs, self.kept.q * self.kept.kv)

    @cached_property
    def kv_segments(self) -> Segments:
        """The key-value rows that each server is sent in any step, by their owners."""
        plan, ranks = self.plan, self.plan.world_size
        if not self.gathers:
            return plan.kv_segments
        document = np.tile(distinct(plan.tasks.document), ranks)
        server = np.repeat(np.arange(ranks), len(document) // ranks)
        start, rows = plan.document_offsets[document], plan.placement.first_rows()
        ends = start + plan.lengths[document]
        return find_segments(server, start, ends, plan.placement, plan.document_offsets, rows)

    @cached_property
    def step_segments(self) -> tuple[StepSegments, ...]:
        """The rows of each step. Of a plan with one they are `q_segments` and `kv_segments`."""
        plan = self.plan
        if self.steps == 1:
            return (StepSegments(plan.q_segments, self.kv_segments, plan.q_segments),)
        own, whole = plan.own_tokens_per_rank(), plan.placement.tokens_per_rank()
        found: list[StepSegments] = []
        for step in range(self.steps):
            alone = replace(plan, tasks=plan.tasks[self.step == step])
            q, kv = alone.q_segments, alone.kv_segments
            if found and self.relays:
                q, kv = relay(q, found[-1].q, own), relay(kv, found[-1].kv, whole)
            found.append(StepSegments(q, kv, alone.q_segments))
        return tuple(found)

    @cached_property
    def kept_keys(self) -> KeptKeys:
        """The keys that servers are sent where tasks drop rows."""
        assert self.kept is not None, "tasks that drop nothing"
        return find_kept_keys(self.plan, self.step, self.kept.kv)


def relay(needed: Segments, before: Segments, local: Int64s) -> Segments:
    """Lets the rows of a step come from ranks that needed them in the step before.

    A row comes from the nearest of these ranks by number, the lower one of two; where there is no
    other, or the server owns it, from its owner.

    Args:
        needed: rows of the step, as their owners would send them.
        before: rows of the step before, as they were sent.
        local: rows that each rank owns, int64 `[ranks]`.
    """
    cuts = distinct(np.concatenate([needed.start, needed.end, before.start, before.end]))
    need, start, end = cut_at(needed.start, needed.end, cuts)
    held, held_start, _ = cut_at(before.start, before.end, cuts)
    by_start = np.argsort(held_start, kind="stable")
    held, held_start = held[by_start], held_start[by_start]
    server, owner = needed.server[need], needed.owner[need]
    row = needed.owner_row[need] + start - needed.start[need]
    first = np.searchsorted(held_start, start)
    holders = np.searchsorted(held_start, start, side="right") - first
    part = np.repeat(np.arange(len(start)), holders)
    holder = held[expand_ranges(first, holders)]
    passes = (owner[part] != server[part]) & (before.server[holder] != server[part])
    part, holder = part[passes], holder[passes]
    rank = before.server[holder]
    nearest = np.lexsort((rank, np.abs(rank - server[part]), part))
    passed_on, first = np.unique(part[nearest], return_index=True)
    chosen = holder[nearest[first]]
    owner[passed_on] = before.server[chosen]
    offset = start[passed_on] - before.start[chosen]
    row[passed_on] = before.served_rows(local)[chosen] + offset
    by = order_by(server, owner, start)
    return Segments(server[by], owner[by], start[by], end[by], row[by])
