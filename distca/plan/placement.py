"""Placement: which rank owns which tokens, and so runs their context-independent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan.span import Bools, Int64s, distinct, expand_ranges, order_by


@dataclass(frozen=True)
class Placement:
    """A table of pieces: row `i` says that `rank[i]` owns `[start[i], end[i])` of `document[i]`.

    The rows (tokens) of a rank are its pieces, concatenated in the order of the table.
    All columns are int64 arrays of one length.
    """

    document: Int64s
    start: Int64s
    end: Int64s
    rank: Int64s
    world_size: int

    def __post_init__(self) -> None:
        columns = (self.document, self.start, self.end, self.rank)
        if len({len(column) for column in columns}) != 1:
            raise ValueError("the columns of a placement differ in length")
        if self.world_size < 1:
            raise ValueError(f"a placement needs at least one rank, not {self.world_size}")

    def select(self, selection: Int64s | Bools) -> Placement:
        """Returns the pieces that a boolean or an index array selects."""
        return Placement(
            self.document[selection],
            self.start[selection],
            self.end[selection],
            self.rank[selection],
            self.world_size,
        )

    @staticmethod
    def concatenate(tables: Sequence[Placement]) -> Placement:
        """Concatenates the pieces of several tables over the same ranks."""
        return Placement(
            np.concatenate([t.document for t in tables]),
            np.concatenate([t.start for t in tables]),
            np.concatenate([t.end for t in tables]),
            np.concatenate([t.rank for t in tables]),
            tables[0].world_size,
        )

    def joined(self) -> Placement:
        """Joins neighbouring pieces of a rank. Sorts by rank, document and position."""
        order = order_by(self.rank, self.document, self.start)
        document, start, end = self.document[order], self.start[order], self.end[order]
        rank = self.rank[order]
        opens = np.ones(len(rank), dtype=bool)
        opens[1:] = (
            (rank[1:] != rank[:-1]) | (document[1:] != document[:-1]) | (start[1:] != end[:-1])
        )
        first = np.flatnonzero(opens)
        last = np.append(first[1:], len(rank))[: len(first)] - 1
        return Placement(document[first], start[first], end[last], rank[first], self.world_size)

    def cut_every(self, tokens: int) -> Placement:
        """Cuts pieces at each position that is a multiple of a number of tokens."""
        first = self.start // tokens
        counts = -(-self.end // tokens) - first
        source = np.repeat(np.arange(len(first)), counts)
        edge = expand_ranges(first, counts) * tokens
        return replace(
            self.select(source),
            start=np.maximum(self.start[source], edge),
            end=np.minimum(self.end[source], edge + tokens),
        )

    def of_rank(self, rank: int) -> Placement:
        """Returns the pieces of one rank, in the order of its rows."""
        return self.select(self.rank == rank)

    def tokens_per_rank(self) -> Int64s:
        """Returns the number of tokens that each rank owns, `[world_size]`."""
        return np.bincount(
            self.rank, weights=self.end - self.start, minlength=self.world_size
        ).astype(np.int64)

    def first_rows(self, counted: Bools | None = None) -> Int64s:
        """Returns the row of each piece's first token on its rank, `[pieces]`.

        Args:
            counted: pieces whose tokens have rows, bool `[pieces]`; None: all.
        """
        lengths = (self.end - self.start) * (1 if counted is None else counted)
        order = order_by(self.rank)
        before = np.cumsum(lengths[order]) - lengths[order]
        rows_per_rank = np.zeros(self.world_size, dtype=np.int64)
        np.add.at(rows_per_rank, self.rank, lengths)
        rank_starts = np.cumsum(rows_per_rank) - rows_per_rank
        rows = np.empty_like(lengths)
        rows[order] = before - rank_starts[self.rank[order]]
        return rows


@dataclass(frozen=True)
class PlacedTokens:
    """Where tokens are, by their global positions. All are int64.

    Attributes:
        rank: rank that owns each, `[tokens]`.
        row: its row there, `[tokens]`.
        until: end of the placed piece that it is in, a global position, `[tokens]`.
    """

    rank: Int64s
    row: Int64s
    until: Int64s


def find_tokens(
    placement: Placement, document_offsets: Int64s, first_rows: Int64s, position: Int64s
) -> PlacedTokens:
    """Finds tokens.

    Args:
        placement: ranks that own all tokens.
        document_offsets: start of each document in global positions, int64 `[documents]`.
        first_rows: row of each placed piece's first token on its owner, int64 `[pieces]`.
        position: global positions, int64 `[tokens]`.
    """
    start = document_offsets[placement.document] + placement.start
    order = np.argsort(start)
    piece = order[np.searchsorted(start[order], position, side="right") - 1]
    row = first_rows[piece] + position - start[piece]
    end = start + placement.end - placement.start
    return PlacedTokens(placement.rank[piece], row, end[piece])


def place_in_turn(lengths: Int64s, capacities: Int64s) -> Placement:
    """Places documents as in the paper: in order, each rank filled in turn (Section 6.1).

    Args:
        lengths: tokens of each document, int64 `[documents]`.
        capacities: tokens that each rank owns, int64 `[ranks]`.

    Raises:
        ValueError: a document has no tokens, or the sums of `lengths` and `capacities` differ.
    """
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a document has {lengths.min()} tokens: give at least 1")
    if int(lengths.sum()) != int(capacities.sum()):
        raise ValueError(
            f"the documents have {int(lengths.sum()):,} tokens, but {len(capacities)} ranks own "
            f"{int(capacities.sum()):,}"
        )
    ends, rank_ends = np.cumsum(lengths), np.cumsum(capacities)
    cuts = distinct(np.concatenate([ends, rank_ends[rank_ends > 0]]))
    starts = np.concatenate([np.zeros(min(len(cuts), 1), dtype=np.int64), cuts[:-1]])
    document = np.searchsorted(ends, starts, side="right")
    offset = (ends - lengths)[document]
    rank = np.searchsorted(rank_ends, starts, side="right")
    return Placement(document, starts - offset, cuts - offset, rank, len(capacities))


def place_sequentially(
    windows: Sequence[Sequence[int] | Int64s], world_size: int, tokens_per_rank: int
) -> Placement:
    """Places several windows, each in turn on all ranks.

    Args:
        windows: document lengths of each window; every window holds exactly
            `world_size * tokens_per_rank` tokens. Documents are numbered across all windows.
        world_size: ranks that share each window.
        tokens_per_rank: tokens that a rank owns of each window.

    Raises:
        ValueError: a window holds another number of tokens, or a length is not positive.
    """
    capacities = np.full(world_size, tokens_per_rank, dtype=np.int64)
    tables = []
    first_document = 0
    for number, window in enumerate(windows):
        lengths = np.asarray(window, dtype=np.int64)
        try:
            placement = place_in_turn(lengths, capacities)
        except ValueError as error:
            raise ValueError(f"window {number}: {error}") from error
        tables.append(replace(placement, document=placement.document + first_document))
        first_document += len(lengths)
    if not tables:
        raise ValueError("there are no windows to place: give at least one")
    return Placement.concatenate(tables)
