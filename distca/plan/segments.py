"""Segments: rows that servers need and who sends them, the source of exchanges and byte counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.placement import Placement
from distca.plan.span import Bools, Int64s, cut_at, order_by, union


@dataclass(frozen=True)
class Segments:
    """A table: `server[i]` needs the tokens `[start[i], end[i])`, which `owner[i]` owns.

    Positions are global (`Plan.document_offsets`); `owner_row` is the row of `start` on its owner.
    A token that a server needs is in the table once, however many tasks share it. Rows are sorted
    by (server, owner, start). A segment with `server == owner` costs no bytes. All columns are
    int64 `[segments]`.

    In a relay (`distca.plan.stepped`) `owner` is the rank that passes the tokens on, and
    `owner_row` counts the rows that arrived there in the step before behind those that it owns.
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
        """Returns the rows that a boolean or an index array selects."""
        return Segments(
            self.server[selection],
            self.owner[selection],
            self.start[selection],
            self.end[selection],
            self.owner_row[selection],
        )

    def served_rows(self, local: Int64s) -> Int64s:
        """Returns the row of each segment's first token on its server, `[segments]`.

        Args:
            local: rows that each rank owns, int64 `[ranks]`. Rows that arrive are counted behind
                them, in the order of the table.
        """
        arriving = np.where(self.owner == self.server, 0, self.lengths)
        before = np.cumsum(arriving) - arriving
        opens = np.zeros(len(before), dtype=bool)
        opens[1:] = self.server[1:] != self.server[:-1]
        # What arrives in all only grows, so the last server's first row is the most of them.
        arrival = before - np.maximum.accumulate(np.where(opens, before, 0))
        return np.where(arriving > 0, local[self.server] + arrival, self.owner_row)

    def moved(self) -> tuple[Int64s, Int64s, Int64s]:
        """Returns the rows that travel: `(owner, server, rows)` of each pair of different ranks.

        Pairs without rows are left out: there are far fewer than ranks squared.
        """
        away = self.select(self.owner != self.server)
        pair_changes = (np.diff(away.server) != 0) | (np.diff(away.owner) != 0)
        first = np.flatnonzero(np.concatenate([[len(away.server) > 0], pair_changes]))
        return away.owner[first], away.server[first], np.add.reduceat(away.lengths, first)

    def moved_per_rank(self, world_size: int) -> tuple[Int64s, Int64s]:
        """Returns the rows that each rank sends, and those that each receives, `[world_size]`."""
        owner, server, rows = self.moved()
        sent, received = np.zeros((2, world_size), dtype=np.int64)
        np.add.at(sent, owner, rows)
        np.add.at(received, server, rows)
        return sent, received

    def moved_rows(self, world_size: int) -> Int64s:
        """Returns the rows that travel from each owner to each server, `[owners, servers]`."""
        matrix = np.zeros((world_size, world_size), dtype=np.int64)
        owner, server, rows = self.moved()
        matrix[owner, server] = rows
        return matrix


def find_segments(
    server: Int64s,
    start: Int64s,
    end: Int64s,
    placement: Placement,
    document_offsets: Int64s,
    first_rows: Int64s,
) -> Segments:
    """Finds who owns the rows that servers need.

    Args:
        server: servers that need the tokens `[start[i], end[i])`, int64 `[needs]`; ranges that
            overlap on a server are joined.
        start: first tokens in global positions, int64 `[needs]`.
        end: ends of the ranges, likewise.
        placement: ranks that own the tokens of all documents.
        document_offsets: start of each document in global positions, int64 `[documents]`.
        first_rows: row of each placed piece's first token on its owner, int64 `[pieces]`.
    """
    server, start, end = union(server, start, end)
    # In global positions the placed pieces tile the range of all tokens.
    piece_start = document_offsets[placement.document] + placement.start
    order = np.argsort(piece_start)
    piece_start = piece_start[order]
    source, start, end = cut_at(start, end, piece_start)
    piece = np.searchsorted(piece_start, start, side="right") - 1
    owner_row = first_rows[order][piece] + start - piece_start[piece]
    owner = placement.rank[order][piece]
    server = server[source]
    by = order_by(server, owner, start)
    return Segments(server[by], owner[by], start[by], end[by], owner_row[by])
