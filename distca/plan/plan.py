"""The plan: one round of core attention, made once and used everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distca.plan.mask import Mask
from distca.plan.placement import PlacedTokens, Placement, find_tokens
from distca.plan.segments import Segments, find_segments
from distca.plan.span import Bools, Floats, Int64s, order_by
from distca.plan.tasks import Tasks

BLOCK = 128
"""Tokens in a block of the attention kernels; cuts fall on its multiples (paper, Section 4.2)."""


class KeyRanges(NamedTuple):
    """Keys of tasks: each has one range, or several where its document has a parent.

    Attributes:
        task: number of the task, rising, int64 `[ranges]`.
        document: document whose own tokens they are, likewise.
        start: first key, a global position, likewise.
        end: end of the range, likewise.
    """

    task: Int64s
    document: Int64s
    start: Int64s
    end: Int64s


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
        cached_prefix: tokens of each document before its first query, which have keys and
            values alone, int64 `[documents]`; None: no document has any. Cuts may fall on blocks
            counted from its end, too.
        head_groups: groups of heads, above 1 in inference alone. Each has documents of its own:
            document `group * sequences + sequence` is what the group's heads see of a sequence. A
            token of its owner has a row for each group, with the heads of that group.
        parents: document whose first tokens are those of each document, its cached prefix, int64
            `[documents]`; -1: none. None: no document has any. A document's *path* is its parent's
            path, up to where it branches off, and then its own tokens; positions and lengths are
            those of paths, and the placement has own tokens alone. Documents with one parent share
            its tokens. A cached prefix of a document without parent is its own.
        query_shift: how far behind its keys each document's queries stand, int64 `[documents]`:
            the number of own tokens where each of these sees all of them, as in an image or an
            encoder, otherwise 0. A token is then at one position as a key, and at another one as a
            query, from which the causal mask sees all of the document. None: all are 0.
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
    parents: Int64s | None = None
    query_shift: Int64s | None = None

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

        Positions in this concatenation, *global positions*, number all tokens of the plan. Where
        documents have parents they number own tokens, and add up for queries alone: `key_ranges`
        has those of keys.
        """
        starts = np.cumsum(self.own_lengths) - self.own_lengths
        return starts - (self.lengths - self.own_lengths)

    @cached_property
    def query_offsets(self) -> Int64s:
        """What is added to a query's position to get its global position, `[documents]`."""
        offsets, shift = self.document_offsets, self.query_shift
        return offsets if shift is None else offsets - shift

    @property
    def own_lengths(self) -> Int64s:
        """Tokens of each document that are not its parent's, `[documents]`."""
        return self.lengths - self.inherited_lengths

    @cached_property
    def inherited_lengths(self) -> Int64s:
        """Tokens of each document that are its parent's, `[documents]`."""
        if self.parents is None:
            return np.zeros_like(self.lengths)
        assert self.cached_prefix is not None
        return np.where(self.parents < 0, 0, self.cached_prefix)

    @cached_property
    def trees(self) -> Int64s:
        """Number of each document's tree: of the documents that share tokens with it."""
        if self.parents is None:
            return np.arange(len(self.lengths))
        found: list[int] = []
        for document, parent in enumerate(self.parents.tolist()):
            found.append(document if parent < 0 else found[parent])
        return np.unique(np.array(found, dtype=np.int64), return_inverse=True)[1].astype(np.int64)

    @cached_property
    def key_ranges(self) -> KeyRanges:
        """The keys of each task in global positions, in the order of its path."""
        t = self.tasks
        numbers = np.arange(len(t))
        if self.parents is None:
            offset = self.document_offsets[t.document]
            return KeyRanges(numbers, t.document, offset + t.kv_start, offset + t.kv_end)
        document, first, end = t.document, t.kv_start, t.kv_end
        found: list[tuple[Int64s, ...]] = []
        # From each document to its parent, until no task has keys before.
        while not found or len(numbers):
            start = np.maximum(first, self.inherited_lengths[document])
            offset, there = self.document_offsets[document], end > start
            ranges = numbers, document, offset + start, offset + end
            found.append(tuple(column[there] for column in ranges))
            goes_on = first < start
            numbers, first = numbers[goes_on], first[goes_on]
            end = np.minimum(end, self.inherited_lengths[document])[goes_on]
            document = self.parents[document[goes_on]]
        columns = [np.concatenate(each[::-1]) for each in zip(*found, strict=True)]
        order = order_by(columns[0])
        return KeyRanges(*(column[order] for column in columns))

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
        rows, t = self.placement.first_rows(self.own_pieces), self.tasks
        offset = self.query_offsets[t.document]
        return self._needed(t.server, offset + t.q_start, offset + t.q_end, rows)

    @cached_property
    def kv_segments(self) -> Segments:
        """The key-value rows that each server needs for its tasks."""
        rows, keys = self.placement.first_rows(), self.key_ranges
        return self._needed(self.tasks.server[keys.task], keys.start, keys.end, rows)

    def owners(self, position: Int64s) -> PlacedTokens:
        """Returns where tokens are, by their global positions: rows count cached ones, too."""
        rows = self.placement.first_rows()
        return find_tokens(self.placement, self.document_offsets, rows, position)

    def _needed(self, server: Int64s, start: Int64s, end: Int64s, first_rows: Int64s) -> Segments:
        return find_segments(server, start, end, self.placement, self.document_offsets, first_rows)

    def loads(self) -> Int64s:
        """Returns the number of visible pairs that each server computes, `[world_size]`."""
        pairs = self.tasks.pairs(self.mask)
        loads = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(loads, self.tasks.server, pairs)
        return loads

    def loads_at_home(self) -> Int64s:
        """Returns the visible pairs of the queries that each rank owns: the loads if none moved."""
        placement = self.placement.select(self.own_pieces)
        start, end, keys = placement.start, placement.end, placement.end
        if self.query_shift is not None:
            shift = self.query_shift[placement.document]
            keys = np.where(shift > 0, self.lengths[placement.document], end)
            start, end = start + shift, end + shift
        pairs = self.mask.pairs(start, end, np.zeros_like(start), keys)
        loads = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(loads, placement.rank, pairs)
        return loads


def max_over_mean(loads: Int64s | Floats) -> float:
    """Returns the busiest server's load over the mean load; 1.0 without any load."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0
