"""Which rank owns which tokens: it runs the context-independent layers for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan.span import Int64s


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

    def of_rank(self, rank: int) -> Placement:
        """The pieces of one rank, in the order of its rows."""
        mine = self.rank == rank
        return Placement(
            self.document[mine], self.start[mine], self.end[mine], self.rank[mine], self.world_size
        )

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


def place_sequentially(
    windows: Sequence[Sequence[int] | Int64s], world_size: int, tokens_per_rank: int
) -> Placement:
    """The paper's placement: documents one after the other, each rank filled in turn (Section 6.1).

    Args:
        windows: the document lengths of each window; every window holds exactly
            `world_size * tokens_per_rank` tokens. Documents are numbered through all windows.
        world_size: ranks that share each window.
        tokens_per_rank: tokens that a rank owns of each window.

    Raises:
        ValueError: a window holds another number of tokens, or a length is not positive.
    """
    tables: list[tuple[Int64s, Int64s, Int64s, Int64s]] = []
    first_document = 0
    rank_cuts = np.arange(1, world_size, dtype=np.int64) * tokens_per_rank
    for number, window in enumerate(windows):
        lengths = np.asarray(window, dtype=np.int64)
        if len(lengths) and lengths.min() < 1:
            raise ValueError(f"window {number} has a document of {lengths.min()} tokens")
        if int(lengths.sum()) != world_size * tokens_per_rank:
            raise ValueError(
                f"window {number} holds {int(lengths.sum())} tokens, but {world_size} ranks with "
                f"{tokens_per_rank} tokens each own {world_size * tokens_per_rank}"
            )
        ends = np.cumsum(lengths)
        cuts = np.union1d(ends, rank_cuts)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), cuts[:-1]])
        document = np.searchsorted(ends, starts, side="right")
        offset = (ends - lengths)[document]
        tables.append(
            (
                document + first_document,
                starts - offset,
                cuts - offset,
                starts // tokens_per_rank,
            )
        )
        first_document += len(lengths)
    document, start, end, rank = (np.concatenate(column) for column in zip(*tables, strict=True))
    return Placement(document, start, end, rank, world_size)
