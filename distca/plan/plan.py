"""The plan: one round of core attention, made once and used everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distca.plan.kept import KeptKeys, PlacedTokens, find_kept_keys, find_tokens
from distca.plan.mask import Mask
from distca.plan.placement import Placement
from distca.plan.segments import Segments, find_segments, relay
from distca.plan.span import Bools, Int64s, cut_at, distinct, order_by
from distca.plan.tasks import Tasks

BLOCK = 128
"""Tokens in a block of the attention kernels; cuts fall on its multiples (paper, Section 4.2)."""


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


@dataclass(frozen=True)
class Plan:
    """Placement and tasks for one round of core attention.

    Its tasks are in ordered *steps*, of which training has one. The rows of a step travel while
    servers compute the step before, and the outputs of a step return while they compute the next.
    A row that a server needs in a step comes from a rank that needed it in the step before (a
    *relay*), else from its owner.

    Attributes:
        lengths: tokens of each document, int64 `[documents]`.
        placement: ranks that own the tokens. Each rank is an attention server, too.
        tasks: tasks that the servers compute.
        mask: attention mask of all documents.
        block: tokens in a kernel's block; cuts fall on its multiples, except at a document's ends
            and where its owner changes.
        scheduler: name of the scheduler that made the plan.
        notes: reasons why a tolerance or a bound was missed; empty if all were met.
        cached_prefix: tokens of each document before its first query, of which there are keys and
            values alone, int64 `[documents]`; None: no document has any. Cuts may fall on blocks
            counted from its end, too.
        gathers: whether each rank is sent all keys and values of its documents, those that none of
            its queries sees, too: an all-gather. Such a plan is a baseline, of one step.
        head_groups: groups of heads, if each has documents of its own: document
            `group * sequences + sequence` is what the group's heads see of a sequence. A token of
            its owner has a row for each group, with the heads of that group.
        relays: whether ranks pass rows on; else all come from their owners. Where tasks drop rows
            there are no relays.
    """

    lengths: Int64s
    placement: Placement
    tasks: Tasks
    mask: Mask = field(default_factory=Mask)
    block: int = BLOCK
    scheduler: str = ""
    notes: tuple[str, ...] = ()
    cached_prefix: Int64s | None = None
    gathers: bool = False
    head_groups: int = 1
    relays: bool = True

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def sequences(self) -> int:
        """Documents, those of all head groups counted once."""
        return len(self.lengths) // self.head_groups

    @cached_property
    def document_offsets(self) -> Int64s:
        """The start of each document when all are concatenated, `[documents]`.

        Positions in this concatenation, *global positions*, number all tokens of the plan.
        """
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def own_pieces(self) -> Bools:
        """The pieces of the placement that have queries, no cached prefixes: bool `[pieces]`."""
        placement = self.placement
        if self.cached_prefix is None:
            return np.ones(len(placement.rank), dtype=bool)
        return placement.start >= self.cached_prefix[placement.document]

    def own_tokens_per_rank(self) -> Int64s:
        """Returns the number of each rank's rows of queries, `[world_size]`: its tokens that have
        any, for each head group."""
        return self.placement.select(self.own_pieces).tokens_per_rank()

    @cached_property
    def q_segments(self) -> Segments:
        """The query rows that each server needs for its tasks.

        The query rows of a rank are numbered without its pieces of cached prefixes.
        """
        rows = self.placement.first_rows(self.own_pieces)
        return self._needed(self.tasks.q_start, self.tasks.q_end, rows)

    @cached_property
    def kv_segments(self) -> Segments:
        """The key-value rows that each server needs for its tasks."""
        rows = self.placement.first_rows()
        if not self.gathers:
            return self._needed(self.tasks.kv_start, self.tasks.kv_end, rows)
        document = np.tile(distinct(self.tasks.document), self.world_size)
        server = np.repeat(np.arange(self.world_size), len(document) // self.world_size)
        start = self.document_offsets[document]
        ends = start + self.lengths[document]
        return find_segments(server, start, ends, self.placement, self.document_offsets, rows)

    @cached_property
    def steps(self) -> int:
        """The number of steps."""
        return int(self.tasks.step.max(initial=0)) + 1

    @cached_property
    def step_segments(self) -> tuple[StepSegments, ...]:
        """The rows of each step. Of a plan with one they are `q_segments` and `kv_segments`."""
        if self.steps == 1:
            return (StepSegments(self.q_segments, self.kv_segments, self.q_segments),)
        own, whole = self.own_tokens_per_rank(), self.placement.tokens_per_rank()
        found: list[StepSegments] = []
        for step in range(self.steps):
            alone = replace(self, tasks=self.tasks[self.tasks.step == step])
            q, kv = alone.q_segments, alone.kv_segments
            if found and self.relays:
                q, kv = relay(q, found[-1].q, own), relay(kv, found[-1].kv, whole)
            found.append(StepSegments(q, kv, alone.q_segments))
        return tuple(found)

    @cached_property
    def kept_keys(self) -> KeptKeys:
        """The keys that servers are sent where tasks drop rows."""
        return find_kept_keys(self.tasks, self.placement, self.document_offsets)

    def owners(self, position: Int64s) -> PlacedTokens:
        """Where tokens are, by their global positions: rows count cached ones, too."""
        rows = self.placement.first_rows()
        return find_tokens(self.placement, self.document_offsets, rows, position)

    def _needed(self, start: Int64s, end: Int64s, first_rows: Int64s) -> Segments:
        offset, server = self.document_offsets[self.tasks.document], self.tasks.server
        return find_segments(
            server, offset + start, offset + end, self.placement, self.document_offsets, first_rows
        )

    def loads(self) -> Int64s:
        """Returns the number of visible pairs that each server computes, `[world_size]`."""
        pairs = self.tasks.pairs(self.mask)
        loads = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(loads, self.tasks.server, pairs)
        return loads

    def loads_at_home(self) -> Int64s:
        """Returns the visible pairs of the queries that each rank owns: the loads if none moved."""
        placement = self.placement.select(self.own_pieces)
        pairs = self.mask.pairs(
            placement.start, placement.end, np.zeros_like(placement.start), placement.end
        )
        loads = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(loads, placement.rank, pairs)
        return loads

    def validate(self) -> None:
        """Checks that the plan covers each visible pair exactly once and cuts where it may.

        Raises:
            ValueError: the plan is not valid; the message has the first offending row.
        """
        if self.head_groups < 1 or len(self.lengths) % self.head_groups:
            raise ValueError(
                f"not a valid plan: {self.head_groups} head groups of {len(self.lengths)} documents"
            )
        _check_placement(self)
        _check_cached_prefixes(self)
        _check_tasks(self)
        _check_steps(self)
        _check_cuts(self)
        _check_cover(self)
        _check_kept(self)


def max_over_mean(loads: Int64s) -> float:
    """Returns the busiest server's load over the mean load; 1.0 without any load."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0


def _refuse(condition: Bools, what: str, *columns: Int64s) -> None:
    """Raises ValueError with the first row for which `condition` holds."""
    if np.any(condition):
        row = int(np.flatnonzero(condition)[0])
        values = [int(column[row]) for column in columns]
        raise ValueError(f"not a valid plan: {what} (row {row}: {values})")


def _check_placement(plan: Plan) -> None:
    placement = plan.placement
    documents = len(plan.lengths)
    _refuse(plan.lengths < 1, "a document has no tokens", plan.lengths)
    columns = (placement.document, placement.start, placement.end, placement.rank)
    _refuse(
        (placement.document < 0) | (placement.document >= documents),
        "no such document is placed",
        *columns,
    )
    _refuse(
        (placement.rank < 0) | (placement.rank >= placement.world_size),
        "placed on no rank",
        *columns,
    )
    _refuse(
        (placement.start < 0)
        | (placement.start >= placement.end)
        | (placement.end > plan.lengths[placement.document]),
        "a placed span is empty or outside its document",
        *columns,
    )
    order = order_by(placement.document, placement.start)
    starts = plan.document_offsets[placement.document[order]] + placement.start[order]
    ends = plan.document_offsets[placement.document[order]] + placement.end[order]
    expected = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    _refuse(starts != expected, "the placement leaves out or repeats tokens", starts, expected)
    if int(ends[-1] if len(ends) else 0) != int(plan.lengths.sum()):
        raise ValueError("not a valid plan: the placement leaves out the last tokens")


def _check_cached_prefixes(plan: Plan) -> None:
    if plan.cached_prefix is None:
        return
    placement, prefix = plan.placement, plan.cached_prefix
    _refuse(
        (prefix < 0) | (prefix >= plan.lengths), "a document has no query", prefix, plan.lengths
    )
    columns = (placement.document, placement.start, placement.end, placement.rank)
    cached = placement.start < prefix[placement.document]
    _refuse(
        cached & (placement.end > prefix[placement.document]),
        "a piece is only in part cached",
        *columns,
    )
    t = plan.tasks
    _refuse(
        t.q_start < prefix[t.document], "a task has a cached query", t.document, t.q_start, t.q_end
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
    if plan.mask.attention_chunk is not None:
        # Kernels know nothing of chunks.
        _refuse(
            t.kv_start < plan.mask.first_key(t.q_end - 1),
            "a task reaches over the edge of a chunk",
            *columns,
        )


def _check_steps(plan: Plan) -> None:
    """Checks that steps are numbered in turn, and that a server is sent a row in one of them."""
    t = plan.tasks
    _refuse(t.step < 0, "a task is in no step", t.document, t.q_start, t.q_end, t.step)
    if plan.steps == 1:
        return
    tasks_of = np.bincount(t.step)
    _refuse(tasks_of == 0, "a step has no task", np.arange(plan.steps))
    for kind, whole in (("q", plan.q_segments), ("kv", plan.kv_segments)):
        _, once = whole.moved_per_rank(plan.world_size)
        each = [
            getattr(step, kind).moved_per_rank(plan.world_size)[1] for step in plan.step_segments
        ]
        received = np.sum(each, axis=0)
        _refuse(
            received > once,
            f"a server is sent a row of {kind} in several steps (server, received, distinct)",
            np.arange(plan.world_size),
            received,
            once,
        )


def _check_cuts(plan: Plan) -> None:
    t = plan.tasks
    placement = plan.placement
    owner_changes = np.sort(plan.document_offsets[placement.document] + placement.start)
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
        if plan.cached_prefix is not None:
            allowed |= (position - plan.cached_prefix[t.document]) % plan.block == 0
        if plan.mask.attention_chunk is not None:
            allowed |= position % plan.mask.attention_chunk == 0
        if name == "kv_start":
            allowed |= position == first_key
        _refuse(
            ~allowed,
            f"{name} is neither on a block of {plan.block}, nor an end, nor a change of owner",
            t.document,
            position,
        )


def _check_cover(plan: Plan) -> None:
    """Checks that no query sees a key twice, and that each document's visible pairs add up."""
    t = plan.tasks
    starts = plan.document_offsets[t.document] + t.q_start
    ends = plan.document_offsets[t.document] + t.q_end
    # Between two neighbouring query cuts a task covers either all queries or none.
    task, slab, _ = cut_at(starts, ends, distinct(np.concatenate([starts, ends])))
    order = order_by(slab, t.kv_start[task])
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
    first = zeros if plan.cached_prefix is None else plan.cached_prefix
    visible = plan.mask.pairs(first, plan.lengths, zeros, plan.lengths)
    numbers = np.arange(len(plan.lengths))
    _refuse(
        covered != visible,
        "a document's visible pairs are not all covered (document, covered, visible)",
        numbers,
        covered,
        visible,
    )


def _check_kept(plan: Plan) -> None:
    """Checks how many rows stay, and that those of other ranks' keys alone are dropped."""
    t = plan.tasks
    if t.kept_q is None or t.kept_kv is None:
        if t.kept_q is not t.kept_kv:
            raise ValueError("not a valid plan: it says of queries or keys alone how many stay")
        return
    if plan.relays and plan.steps > 1:
        raise ValueError("not a valid plan: rows that are in part dropped are passed on")
    offset = plan.document_offsets[t.document]
    queries, keys = (plan.owners(offset + start) for start in (t.q_start, t.kv_start))
    columns = (t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, t.server)
    of_one = (offset + t.q_end <= queries.until) & (offset + t.kv_end <= keys.until)
    _refuse(~of_one, "a task that may drop rows has rows of several pieces", *columns)
    _refuse(
        queries.rank != t.server, "a task that may drop rows is not where its queries are", *columns
    )
    at_home = keys.rank == t.server
    for kept, start, end in ((t.kept_q, t.q_start, t.q_end), (t.kept_kv, t.kv_start, t.kv_end)):
        rows = (end - start)[:, None]
        outside = np.any((kept < 1) | (kept > rows), axis=1)
        _refuse(outside, "a task keeps no such rows", *columns)
        dropped = np.any(kept < rows, axis=1)
        _refuse(at_home & dropped, "a task drops a rank's own rows", *columns)
    _refuse(at_home & (t.step > 0), "a rank's own rows are not in the first step", *columns)
    _refuse(~at_home & t.ends_on_diagonal, "a task on the diagonal has keys elsewhere", *columns)
    sent = plan.kept_keys
    again = (np.diff(sent.server) == 0) & (sent.start[1:] < sent.end[:-1])
    _refuse(again, "a server is sent several choices of a key", sent.server[1:], sent.start[1:])
