"""Keys that travel where tasks drop some of them: numbers of keys, by key-value head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.plan import Plan
from distca.plan.span import Bools, Int64s


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
        """Returns the rows of one step, sorted by (server, owner, start)."""
        mine = np.flatnonzero(self.step == step)
        by = np.lexsort((self.start[mine], self.owner[mine], self.server[mine]))
        return self.select(mine[by])

    def moved(self) -> tuple[Int64s, Int64s, Int64s]:
        """Returns the rows of single heads that travel: `(owner, server, rows)` of each pair of
        ranks."""
        ranks = int(max(self.owner.max(initial=0), self.server.max(initial=0))) + 1
        pairs, where = np.unique(self.server * ranks + self.owner, return_inverse=True)
        rows = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(rows, where, self.counts.sum(axis=1))
        return pairs % ranks, pairs // ranks, rows


def find_kept_keys(plan: Plan, step: Int64s, counts: Int64s) -> KeptKeys:
    """Finds the keys that servers are sent.

    Args:
        plan: plan whose tasks are over keys of one placed piece each.
        step: step of each task, int64 `[tasks]`.
        counts: keys of each task that stay, int64 `[tasks, kv_heads]`.
    """
    tasks = plan.tasks
    start = plan.document_offsets[tasks.document] + tasks.kv_start
    at = plan.owners(start)
    length = tasks.kv_end - tasks.kv_start
    columns = [tasks.server, start, start + length, step, at.rank, at.row, counts]
    table = np.unique(np.column_stack(columns)[at.rank != tasks.server], axis=0)
    server, start, end, step, owner, row = table[:, :6].T
    return KeptKeys(step, server, owner, start, end, row, table[:, 6:])
