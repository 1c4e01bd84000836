"""Which rank owns which tokens: it runs the context-independent layers for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan.span import Bools, Int64s


@dataclass(frozen=True)
class Placement:
    """A table of pieces: row `i` says that `rank[i]` owns `[start[i], end[i])` of `document[i]`.

    The rows (tokens) of a rank are its pieces in the order of the table, one after the other.
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
        """The selected pieces, by a boolean or an index array."""
        return Placement(
            self.document[selection],
            self.start[selection],
            self.end[selection],
            self.rank[selection],
            self.world_size,
        )

    @staticmethod
    def concatenate(tables: Sequence[Placement]) -> Placement:
        """The pieces of several tables over the same ranks, one table after the other."""
        return Placement(
            np.concatenate([t.document for t in tables]),
            np.concatenate([t.start for t in tables]),
            np.concatenate([t.end for t in tables]),
            np.concatenate([t.rank for t in tables]),
            tables[0].world_size,
        )

    def of_rank(self, rank: int) -> Placement:
        """The pieces of one rank, in the order of its rows."""
        return self.select(self.rank == rank)

    def tokens_per_rank(self) -> Int64s:
        """How many tokens each rank owns, `[world_size]`."""
        return np.bincount(
            self.rank, weights=self.end - self.start, minlength=self.world_size
        ).astype(np.int64)

    def first_rows(self) -> Int64s:
        """For each piece the row of its first token on its rank, `[pieces]`."""
        lengths = self.end - self.start
        order = np.argsort(self.rank, kind="stable")
        before = np.cumsum(lengths[order]) - lengths[order]
        rank_starts = np.cumsum(self.tokens_per_rank()) - self.tokens_per_rank()
        rows = np.empty_like(lengths)
        rows[order] = before - rank_starts[self.rank[order]]
        return rows


def place_in_turn(lengths: Int64s, rooms: Int64s) -> Placement:
    """The paper's placement: documents one after the other, each rank filled in turn (Section 6.1).

    Args:
        lengths: tokens of each document, int64 `[documents]`.
        rooms: tokens that each rank owns, int64 `[ranks]`.

    Raises:
        ValueError: a document has no tokens, or they are not as many as the ranks own.
    """
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"a document has {lengths.min()} tokens: give at least 1")
    if int(lengths.sum()) != int(rooms.sum()):
        raise ValueError(
            f"the documents have {int(lengths.sum()):,} tokens, but {len(rooms)} ranks own "
            f"{int(rooms.sum()):,}"
        )
    ends, rank_ends = np.cumsum(lengths), np.cumsum(rooms)
    cuts = np.union1d(ends, rank_ends[rank_ends > 0])
    starts = np.concatenate([np.zeros(min(len(cuts), 1), dtype=np.int64), cuts[:-1]])
    document = np.searchsorted(ends, starts, side="right")
    offset = (ends - lengths)[document]
    rank = np.searchsorted(rank_ends, starts, side="right")
    return Placement(document, starts - offset, cuts - offset, rank, len(rooms))


def place_sequentially(
    windows: Sequence[Sequence[int] | Int64s], world_size: int, tokens_per_rank: int
) -> Placement:
    """Several windows, each placed in turn on all ranks.

    Args:
        windows: the document lengths of each window; every window holds exactly
            `world_size * tokens_per_rank` tokens. Documents are numbered through all windows.
        world_size: ranks that share each window.
        tokens_per_rank: tokens that a rank owns of each window.

    Raises:
        ValueError: a window holds another number of tokens, or a length is not positive.
    """
    rooms = np.full(world_size, tokens_per_rank, dtype=np.int64)
    tables = []
    first_document = 0
    for number, window in enumerate(windows):
        lengths = np.asarray(window, dtype=np.int64)
        try:
            at = place_in_turn(lengths, rooms)
        except ValueError as error:
            raise ValueError(f"window {number}: {error}") from error
        tables.append(replace(at, document=at.document + first_document))
        first_document += len(lengths)
    if not tables:
        raise ValueError("there are no windows to place: give at least one")
    return Placement.concatenate(tables)
