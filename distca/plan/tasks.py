"""Tasks of core attention, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from distca.plan.mask import Mask
from distca.plan.span import Bools, Int64s


@dataclass(frozen=True)
class Tasks:
    """A table: `server` computes the queries `[q_start, q_end)` of `document` over its keys
    `[kv_start, kv_end)`. All columns are int64 `[tasks]`; positions are those of the document.

    A task has one of the two shapes that a fused variable-length kernel runs at full speed: a full
    rectangle, whose queries all see all of its keys, or a piece that ends on the diagonal
    (`q_end == kv_end`), causal aligned to the lower right, within the mask's window.
    """

    document: Int64s
    q_start: Int64s
    q_end: Int64s
    kv_start: Int64s
    kv_end: Int64s
    server: Int64s

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, selection: Int64s | Bools) -> Tasks:
        """Returns the rows that a boolean or an index array selects."""
        return Tasks(
            self.document[selection],
            self.q_start[selection],
            self.q_end[selection],
            self.kv_start[selection],
            self.kv_end[selection],
            self.server[selection],
        )

    @staticmethod
    def from_rows(rows: Iterable[tuple[int, ...]]) -> Tasks:
        """Makes a table of tuples `(document, q_start, q_end, kv_start, kv_end, server)`."""
        listed = list(rows)
        table = np.array(listed, dtype=np.int64).reshape(-1, len(listed[0]) if listed else 6)
        return Tasks(*(np.ascontiguousarray(column) for column in table.T))

    @staticmethod
    def concatenate(tables: Sequence[Tasks]) -> Tasks:
        """Concatenates the rows of several tables."""
        names = [column.name for column in fields(Tasks)]
        return Tasks(*(np.concatenate([getattr(t, name) for t in tables]) for name in names))

    @property
    def ends_on_diagonal(self) -> Bools:
        """Whether a task ends on the diagonal, else it is a full rectangle: bool `[tasks]`."""
        return self.q_end == self.kv_end

    def pairs(self, mask: Mask) -> Int64s:
        """Returns the number of visible pairs of each task, `[tasks]`."""
        return mask.pairs(self.q_start, self.q_end, self.kv_start, self.kv_end)
