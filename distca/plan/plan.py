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
from distca.plan.span import Bools, Int64s, distinct
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


def max_over_mean(loads: Int64s) -> float:
    """Returns the busiest server's load over the mean load; 1.0 without any load."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0
