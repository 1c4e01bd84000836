"""Keys that travel where tasks drop some of them: how many of which, by key-value head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.placement import Placement
from distca.plan.span import Bools, Int64s
from distca.plan.tasks import Tasks


@dataclass(frozen=True)
class KeptKeys:
    """A table: in `step[i]`, `server[i]` needs `counts[i]` of the keys `[start[i], end[i])`, which
    another rank, `owner[i]`, owns.

    Positions are global (`Plan.document_offsets`); `owner_row` is the row of `start` on its owner.
    Tasks of a server over the same keys share what it is sent. Rows are sorted by (server, start).
    Columns are int64 `[spans]`, and `counts` `[spans, kv_heads]`.
    """

    step: Int64s
    server: Int64s
    owner: Int64s
    start: Int64s
    end: Int64s
    owner_row: Int64s
    counts: Int64s

    def select(self, selection: Int64s | Bools) -> KeptKeys:
        """Returns the rows that a boolean or an index array selects."""
        return KeptKeys(
            self.step[selection],
            self.server[selection],
            self.owner[selection],
            self.start[selection],
            self.end[selection],
            self.owner_row[selection],
            self.counts[selection],
        )

    def of_step(self, step: int) -> KeptKeys:
        """The rows of one step, sorted by (server, owner, start)."""
        mine = np.flatnonzero(self.step == step)
        by = np.lexsort((self.start[mine], self.owner[mine], self.server[mine]))
        return self.select(mine[by])

    def moved(self) -> tuple[Int64s, Int64s, Int64s]:
        """Rows of single heads that travel: `(owner, server, rows)` of each pair of ranks."""
        ranks = int(max(self.owner.max(initial=0), self.server.max(initial=0))) + 1
        pairs, where = np.unique(self.server * ranks + self.owner, return_inverse=True)
        rows = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(rows, where, self.counts.sum(axis=1))
        return pairs % ranks, pairs // ranks, rows


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


def find_kept_keys(tasks: Tasks, placement: Placement, document_offsets: Int64s) -> KeptKeys:
    """Finds the keys that servers are sent.

    Args:
        tasks: tasks that say how many rows stay, over keys of one placed piece each.
        placement: ranks that own the tokens.
        document_offsets: start of each document in global positions, int64 `[documents]`.
    """
    assert tasks.kept_kv is not None, "tasks that drop nothing"
    start = document_offsets[tasks.document] + tasks.kv_start
    at = find_tokens(placement, document_offsets, placement.first_rows(), start)
    length = tasks.kv_end - tasks.kv_start
    columns = [tasks.server, start, start + length, tasks.step, at.rank, at.row, tasks.kept_kv]
    table = np.unique(np.column_stack(columns)[at.rank != tasks.server], axis=0)
    server, start, end, step, owner, row = table[:, :6].T
    return KeptKeys(step, server, owner, start, end, row, table[:, 6:])
