"""The plan: one round of core attention, made once and used everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distca.plan.mask import Mask
from distca.plan.placement import Placement
from distca.plan.segments import Segments, find_segments
from distca.plan.span import Bools, Int64s, cut_at
from distca.plan.tasks import Tasks

BLOCK = 128
"""Tokens in a block of the attention kernels: cuts fall on its multiples (paper, Section 4.2)."""


@dataclass(frozen=True)
class Plan:
    """Placement and tasks for one round of core attention.

    Attributes:
        lengths: tokens of each document, int64 `[documents]`.
        placement: who owns which tokens. Each rank of it is an attention server, too.
        tasks: who computes what.
        mask: what a query sees.
        block: cuts fall on multiples of it, but for a document's ends and changes of owner.
        scheduler: the name of the scheduler that made it.
        notes: why a tolerance or a bound was missed; empty when all was met.
        first_query: int64 `[documents]`, the first query of each document that the plan is for;
            None: 0. The tokens before it were in the nano-batch before, with their own queries, and
            are here as keys and values alone. Cuts are on blocks counted from it, too. On every
            rank the pieces of such tokens come after all others.
    """

    lengths: Int64s
    placement: Placement
    tasks: Tasks
    mask: Mask = field(default_factory=Mask)
    block: int = BLOCK
    scheduler: str = ""
    notes: tuple[str, ...] = ()
    first_query: Int64s | None = None

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @cached_property
    def document_offsets(self) -> Int64s:
        """Where each document starts when all lie one after the other, `[documents]`.

        These "global positions" give every token of the plan one number.
        """
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def own_pieces(self) -> Bools:
        """Which pieces of the placement are not of the nano-batch before, `[pieces]`."""
        at = self.placement
        if self.first_query is None:
            return np.ones(len(at.rank), dtype=bool)
        return at.start >= self.first_query[at.document]

    def own_tokens_per_rank(self) -> Int64s:
        """The tokens of each rank whose queries the plan is for, `[world_size]`."""
        return self.placement.select(self.own_pieces).tokens_per_rank()

    @cached_property
    def q_segments(self) -> Segments:
        """The query rows that each server needs for its tasks."""
        return self._needed(self.tasks.q_start, self.tasks.q_end)

    @cached_property
    def kv_segments(self) -> Segments:
        """The key-value rows that each server needs for its tasks."""
        return self._needed(self.tasks.kv_start, self.tasks.kv_end)

    def _needed(self, start: Int64s, end: Int64s) -> Segments:
        offset = self.document_offsets[self.tasks.document]
        return find_segments(
            self.tasks.server, offset + start, offset + end, self.placement, self.document_offsets
        )

    def loads(self) -> Int64s:
        """Visible pairs that each server computes, `[world_size]`."""
        pairs = self.tasks.pairs(self.mask)
        loads = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(loads, self.tasks.server, pairs)
        return loads

    def loads_at_home(self) -> Int64s:
        """Visible pairs of the queries that each rank owns: the loads if nothing moved."""
        at = self.placement.select(self.own_pieces)
        pairs = self.mask.pairs(at.start, at.end, np.zeros_like(at.start), at.end)
        loads = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(loads, at.rank, pairs)
        return loads

    def validate(self) -> None:
        """Checks that the plan covers each visible pair exactly once and cuts where it may.

        Raises:
            ValueError: what is wrong, with the first offending row.
        """
        _check_placement(self)
        _check_first_queries(self)
        _check_tasks(self)
        _check_cuts(self)
        _check_cover(self)


def max_over_mean(loads: Int64s) -> float:
    """The busiest server's load over the mean load; 1.0 when there is nothing to do."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0


def _refuse(condition: Bools, what: str, *columns: Int64s) -> None:
    """Raises ValueError with the first row for which `condition` holds."""
    if np.any(condition):
        row = int(np.flatnonzero(condition)[0])
        values = [int(column[row]) for column in columns]
        raise ValueError(f"not a valid plan: {what} (row {row}: {values})")


def _check_placement(plan: Plan) -> None:
    at = plan.placement
    documents = len(plan.lengths)
    _refuse(plan.lengths < 1, "a document has no tokens", plan.lengths)
    columns = (at.document, at.start, at.end, at.rank)
    _refuse((at.document < 0) | (at.document >= documents), "no such document is placed", *columns)
    _refuse((at.rank < 0) | (at.rank >= at.world_size), "placed on no rank", *columns)
    _refuse(
        (at.start < 0) | (at.start >= at.end) | (at.end > plan.lengths[at.document]),
        "a placed span is empty or outside its document",
        *columns,
    )
    order = np.lexsort((at.start, at.document))
    starts = plan.document_offsets[at.document[order]] + at.start[order]
    ends = plan.document_offsets[at.document[order]] + at.end[order]
    expected = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    _refuse(starts != expected, "the placement leaves out or repeats tokens", starts, expected)
    if int(ends[-1] if len(ends) else 0) != int(plan.lengths.sum()):
        raise ValueError("not a valid plan: the placement leaves out the last tokens")


def _check_first_queries(plan: Plan) -> None:
    if plan.first_query is None:
        return
    at, first = plan.placement, plan.first_query
    _refuse((first < 0) | (first >= plan.lengths), "a document has no query", first, plan.lengths)
    columns = (at.document, at.start, at.end, at.rank)
    before = at.start < first[at.document]
    _refuse(before & (at.end > first[at.document]), "a piece is of two nano-batches", *columns)
    latest = np.full(plan.world_size, -1)
    numbers = np.arange(len(at.rank))
    np.maximum.at(latest, at.rank[~before], numbers[~before])
    _refuse(before & (numbers < latest[at.rank]), "earlier tokens come first", *columns)
    t = plan.tasks
    _refuse(
        t.q_start < first[t.document], "a task has an earlier query", t.document, t.q_start, t.q_end
    )


def _check_tasks(plan: Plan) -> None:
    t = plan.tasks
    columns = (t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, t.server)
    documents, servers = len(plan.lengths), plan.world_size
    _refuse((t.document < 0) | (t.document >= documents), "no such document has a task", *columns)
    _refuse((t.server < 0) | (t.server >= servers), "a task has no such server", *columns)
    length = plan.lengths[t.document]
    _refuse(
        (t.q_start < 0) | (t.q_start >= t.q_end) | (t.q_end > length),
        "a task's queries are empty or outside the document",
        *columns,
    )
    _refuse(
        (t.kv_start < 0) | (t.kv_start >= t.kv_end) | (t.kv_end > length),
        "a task's keys are empty or outside the document",
        *columns,
    )
    full = plan.mask.is_full(t.q_start, t.q_end, t.kv_start, t.kv_end)
    _refuse(
        ~(full | t.ends_on_diagonal),
        "a task is neither a full rectangle nor ends on the diagonal",
        *columns,
    )


def _check_cuts(plan: Plan) -> None:
    t = plan.tasks
    at = plan.placement
    owner_changes = np.sort(plan.document_offsets[at.document] + at.start)
    first_key = plan.mask.first_key(t.q_start)
    for name, position in (
        ("q_start", t.q_start),
        ("q_end", t.q_end),
        ("kv_start", t.kv_start),
        ("kv_end", t.kv_end),
    ):
        where = plan.document_offsets[t.document] + position
        found = np.searchsorted(owner_changes, where)
        at_change = owner_changes[np.minimum(found, len(owner_changes) - 1)] == where
        allowed = (position % plan.block == 0) | (position == plan.lengths[t.document]) | at_change
        if plan.first_query is not None:
            allowed |= (position - plan.first_query[t.document]) % plan.block == 0
        if name == "kv_start":
            allowed |= position == first_key
        _refuse(
            ~allowed,
            f"{name} is neither on a block of {plan.block}, nor an end, nor a change of owner",
            t.document,
            position,
        )


def _check_cover(plan: Plan) -> None:
    """No query sees a key twice, and the visible pairs of each document add up."""
    t = plan.tasks
    starts = plan.document_offsets[t.document] + t.q_start
    ends = plan.document_offsets[t.document] + t.q_end
    # Between two neighbouring query cuts every task either covers all queries or none.
    task, slab, _ = cut_at(starts, ends, np.unique(np.concatenate([starts, ends])))
    order = np.lexsort((t.kv_start[task], slab))
    task, slab = task[order], slab[order]
    overlap = (slab[1:] == slab[:-1]) & (t.kv_end[task][:-1] > t.kv_start[task][1:])
    _refuse(
        overlap,
        "a query meets a key in two tasks",
        t.document[task][1:],
        t.q_start[task][1:],
        t.q_end[task][1:],
        t.kv_start[task][1:],
        t.kv_end[task][1:],
    )
    covered = np.zeros(len(plan.lengths), dtype=np.int64)
    np.add.at(covered, t.document, t.pairs(plan.mask))
    zeros = np.zeros_like(plan.lengths)
    first = zeros if plan.first_query is None else plan.first_query
    visible = plan.mask.pairs(first, plan.lengths, zeros, plan.lengths)
    numbers = np.arange(len(plan.lengths))
    _refuse(
        covered != visible,
        "a document's visible pairs are not all covered (document, covered, visible)",
        numbers,
        covered,
        visible,
    )
