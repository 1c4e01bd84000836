"""Moves of keys and values after a prefill, so that every rank holds an equal share for decoding.

A decoded token meets all keys, so a step takes as long as the rank with the most rows. A prompt
that was shared out in zigzag, or evenly over a chain, lies evenly; an unequal chain leaves most
rows with the first of its ranks. Surplus rows then move once, layer by layer: as few as make all
shares equal up to a stripe, in multiples of it, and the last of a rank, whose other rows stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.cost.volume import AttentionShape, Messages
from distca.plan import Placement, Segments
from distca.plan.segments import find_segments
from distca.plan.span import Int64s


@dataclass(frozen=True)
class Restripe:
    """Who holds the rows of some sequences before, and who after their surplus has moved.

    Attributes:
        sequences: sequences, by number: the documents of all placements in their order.
        before: holders before, sorted by document and position; all positions from 0 on.
        after: holders after, likewise.
        new: holders after of what could move alone.
    """

    sequences: tuple[int, ...]
    before: Placement
    after: Placement
    new: Placement

    @cached_property
    def offsets(self) -> Int64s:
        """Start of each document in global positions, int64 `[sequences]`."""
        lengths = np.zeros(len(self.sequences), dtype=np.int64)
        np.maximum.at(lengths, self.before.document, self.before.end)
        return np.cumsum(lengths) - lengths

    @cached_property
    def segments(self) -> Segments:
        """The rows that each rank holds afterwards, and who held them."""
        after, first_rows = self.after, self.before.first_rows()
        start, end = (self.offsets[after.document] + each for each in (after.start, after.end))
        return find_segments(after.rank, start, end, self.before, self.offsets, first_rows)

    def rows(self, held: Placement) -> Int64s:
        """Returns the rows of each sequence on each rank, int64 `[sequences, ranks]`."""
        rows = np.zeros((len(self.sequences), held.world_size), dtype=np.int64)
        np.add.at(rows, (held.document, held.rank), held.end - held.start)
        return rows

    def messages(self, shape: AttentionShape) -> Messages:
        """Returns the bytes of a layer's rows, from one rank to another."""
        owner, server, rows = self.segments.moved()
        return Messages(owner, server, rows * shape.kv_row_bytes, self.before.world_size)

    def bytes_by_sequence(self, shape: AttentionShape) -> Int64s:
        """Returns the bytes that a layer's rows take on their way, int64 `[sequences]`."""
        moved = self.segments.select(self.segments.owner != self.segments.server)
        found = np.zeros(len(self.sequences), dtype=np.int64)
        of_sequence = np.searchsorted(self.offsets, moved.start, side="right") - 1
        np.add.at(found, of_sequence, moved.lengths * shape.kv_row_bytes)
        return found


def restripe(
    sequences: tuple[int, ...], held: Placement, new: Placement, stripe: int
) -> Restripe | None:
    """Evens out what ranks hold of sequences; None: they hold equal shares already.

    Args:
        sequences: sequences, by number.
        held: who holds all their rows, numbered in their order, the new ones among them.
        new: pieces that may move: those of the prefill that was run. Earlier ones stay.
        stripe: rows by which shares may differ, and whose multiples move.
    """
    pieces: list[tuple[int, int, int, int]] = []
    for number in range(len(sequences)):
        mine = new.select(new.document == number)
        rows = mine.tokens_per_rank()
        fixed = held.select(held.document == number).tokens_per_rank() - rows
        surplus = rows - even_shares(fixed, rows, stripe)
        pieces += [(number, *piece) for piece in _moved(mine, surplus)]
    if not pieces:
        return None
    earlier = _before(held, new)
    document, start, end, rank = np.array(_replaced(new, pieces), dtype=np.int64).T
    moved = Placement(document, start, end, rank, held.world_size)
    before, after = (
        _in_order(Placement.concatenate([earlier, each]).joined()) for each in (new, moved)
    )
    return Restripe(sequences, before, after, moved)


def even_shares(fixed: Int64s, rows: Int64s, stripe: int) -> Int64s:
    """Returns the rows that each rank should have beside those that are fixed, int64 `[ranks]`.

    Stripes are given to whoever has fewest, and of those to whoever had most.
    """
    shares = rows % stripe
    level = [(int(fixed[r] + shares[r]), -int(rows[r]), r) for r in range(len(rows))]
    heapq.heapify(level)
    for _ in range(int((rows // stripe).sum())):
        height, had, rank = level[0]
        heapq.heapreplace(level, (height + stripe, had, rank))
        shares[rank] += stripe
    return shares


def _moved(new: Placement, surplus: Int64s) -> Iterator[tuple[int, int, int]]:
    """Spans that move, each with its new rank: the last of the ranks that have a surplus."""
    order = np.argsort(new.start)[::-1]
    left = surplus.copy()
    takers = [rank for rank in range(new.world_size) if surplus[rank] < 0]
    for start, end, rank in zip(
        *(column[order].tolist() for column in (new.start, new.end, new.rank)), strict=True
    ):
        start = max(start, end - max(int(left[rank]), 0))
        left[rank] -= end - start
        while end > start:
            taker = takers[0]
            begin = max(start, end + int(left[taker]))
            yield begin, end, taker
            left[taker] += end - begin
            if not left[taker]:
                takers.pop(0)
            end = begin


def _replaced(
    new: Placement, pieces: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Returns the pieces of `new` without those that move, and these."""
    found = list(pieces)
    columns = new.document, new.start, new.end, new.rank
    for document, start, end, rank in zip(*(each.tolist() for each in columns), strict=True):
        # The end of a piece moves, or all of it, or nothing.
        gone = [p[1] for p in pieces if p[0] == document and start <= p[1] < end]
        if min(gone, default=end) > start:
            found.append((document, start, min(gone, default=end), rank))
    return found


def _before(held: Placement, new: Placement) -> Placement:
    """Returns the pieces of all documents as far as they lie before the first new position."""
    first = np.full(int(held.document.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, new.document, new.start)
    cut = replace(held, end=np.minimum(held.end, first[held.document]))
    return cut.select(cut.start < cut.end)


def _in_order(placement: Placement) -> Placement:
    return placement.select(np.lexsort((placement.start, placement.document)))
