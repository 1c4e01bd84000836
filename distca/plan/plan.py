"""The plan: one round of core attention, made once and used everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from distca.plan.mask import Mask
from distca.plan.placement import PlacedTokens, Placement, find_tokens
from distca.plan.segments import Segments, find_segments
from distca.plan.span import Bools, Int64s
from distca.plan.tasks import Tasks

BLOCK = 128
"""Tokens in a block of the attention kernels; cuts fall on its multiples (paper, Section 4.2)."""


@dataclass(frozen=True)
class Plan:
    """Placement and tasks for one round of core attention.

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
        head_groups: groups of heads, above 1 in inference alone. Each has documents of its own:
            document `group * sequences + sequence` is what the group's heads see of a sequence. A
            token of its owner has a row for each group, with the heads of that group.
    """

    lengths: Int64s
    placement: Placement
    tasks: Tasks
    mask: Mask = field(default_factory=Mask)
    block: int = BLOCK
    scheduler: str = ""
    notes: tuple[str, ...] = ()
    cached_prefix: Int64s | None = None
    head_groups: int = 1

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
        """Returns each rank's query rows, int64 `[world_size]`: cached prefixes have none, and a
        token has one for each head group."""
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
        return self._needed(self.tasks.kv_start, self.tasks.kv_end, rows)

    def owners(self, position: Int64s) -> PlacedTokens:
        """Returns where tokens are, by their global positions: rows count cached ones, too."""
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
