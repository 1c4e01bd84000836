"""Which rows a plan needs where: the one source of the exchange and of the byte counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.plan.plan import Plan
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


def needed_segments(plan: Plan, which: Literal["q", "kv"]) -> Segments:
    """The query rows, or the key-value rows, that each server needs for its tasks."""
    tasks, at = plan.tasks, plan.placement
    start, end = (tasks.q_start, tasks.q_end) if which == "q" else (tasks.kv_start, tasks.kv_end)
    offset = plan.document_offsets[tasks.document]
    server, start, end = union(tasks.server, offset + start, offset + end)
    # The pieces of the placement, in global positions, tile the line of all tokens.
    piece_start = plan.document_offsets[at.document] + at.start
    order = np.argsort(piece_start)
    piece_start = piece_start[order]
    source, start, end = cut_at(start, end, piece_start)
    piece = np.searchsorted(piece_start, start, side="right") - 1
    owner_row = at.first_rows()[order][piece] + start - piece_start[piece]
    owner = at.rank[order][piece]
    server = server[source]
    by = np.lexsort((start, owner, server))
    return Segments(server[by], owner[by], start[by], end[by], owner_row[by])
