"""Which rows a plan needs where: the one source of the exchange and of the byte counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.placement import Placement
from distca.plan.span import Bools, Int64s, cut_at, union


@dataclass(frozen=True)
class Segments:
    """Row `i`: `server[i]` needs the tokens `[start[i], end[i])`, which `owner[i]` owns.

    Positions are global (`Plan.document_offsets`), `owner_row` is the row of `start` on its owner.
    Every token that a server needs stands in it once, however many tasks share it, in the order
    (server, owner, start). A segment with `server == owner` costs no bytes. int64 `[segments]`.
    """

    server: Int64s
    owner: Int64s
    start: Int64s
    end: Int64s
    owner_row: Int64s

    @property
    def lengths(self) -> Int64s:
        return self.end - self.start

    def select(self, selection: Int64s | Bools) -> Segments:
        """The selected rows, by a boolean or an index array."""
        return Segments(
            self.server[selection],
            self.owner[selection],
            self.start[selection],
            self.end[selection],
            self.owner_row[selection],
        )

    def moved_rows(self, world_size: int) -> Int64s:
        """Rows that travel from each owner (first axis) to each server, `[world, world]`."""
        moved = np.zeros((world_size, world_size), dtype=np.int64)
        np.add.at(moved, (self.owner, self.server), self.lengths)
        np.fill_diagonal(moved, 0)
        return moved


def find_segments(
    server: Int64s, start: Int64s, end: Int64s, placement: Placement, document_offsets: Int64s
) -> Segments:
    """Which rows servers need, and who owns them.

    Args:
        server: who needs the tokens `[start[i], end[i])`, in global positions; overlaps are joined.
        start: int64 `[needs]`.
        end: int64 `[needs]`.
        placement: who owns which tokens; it covers all documents.
        document_offsets: where each document starts, in global positions.
    """
    at = placement
    server, start, end = union(server, start, end)
    # The pieces of the placement, in global positions, tile the line of all tokens.
    piece_start = document_offsets[at.document] + at.start
    order = np.argsort(piece_start)
    piece_start = piece_start[order]
    source, start, end = cut_at(start, end, piece_start)
    piece = np.searchsorted(piece_start, start, side="right") - 1
    owner_row = at.first_rows()[order][piece] + start - piece_start[piece]
    owner = at.rank[order][piece]
    server = server[source]
    by = np.lexsort((start, owner, server))
    return Segments(server[by], owner[by], start[by], end[by], owner_row[by])
