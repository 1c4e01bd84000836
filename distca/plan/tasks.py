"""Tasks of core attention, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from distca.plan.mask import Mask
from distca.plan.span import Bools, Int64s


@dataclass(frozen=True)
class Tasks:
    """A table: `server` computes the queries `[q_start, q_end)` of `document` over its keys
    `[kv_start, kv_end)`. All columns are int64 `[tasks]`; positions are those of the document.

    A task has one of the two shapes that a fused variable-length kernel runs at full speed: a full
    rectangle, all keys of which all of its queries see, or a piece that ends on the diagonal
    (`q_end == kv_end`), causal aligned to the lower right, within the mask's window.

    A task belongs to a `step` of its plan: rows of a step travel while servers compute the step
    before. Without the column all tasks are in step 0.

    Of a task's rows some may be dropped, in each key-value head others: *which* is chosen when the
    plan runs, *how many* stay is `kept_q` and `kept_kv`, int64 `[tasks, kv_heads]`. Without these
    columns nothing is dropped.
    """

    document: Int64s
    q_start: Int64s
    q_end: Int64s
    kv_start: Int64s
    kv_end: Int64s
    server: Int64s
    step: Int64s = None  # type: ignore[assignment]
    kept_q: Int64s | None = None
    kept_kv: Int64s | None = None

    def __post_init__(self) -> None:
        if self.step is None:
            object.__setattr__(self, "step", np.zeros(len(self.document), dtype=np.int64))

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
            self.step[selection],
            None if self.kept_q is None else self.kept_q[selection],
            None if self.kept_kv is None else self.kept_kv[selection],
        )

    def of_kv_heads(self, heads: slice) -> Tasks:
        """The tasks of some key-value heads alone, where rows of heads may be dropped."""
        if self.kept_q is None or self.kept_kv is None:
            return self
        return replace(self, kept_q=self.kept_q[:, heads], kept_kv=self.kept_kv[:, heads])

    @staticmethod
    def from_rows(rows: Iterable[tuple[int, ...]]) -> Tasks:
        """Makes a table of tuples `(document, q_start, q_end, kv_start, kv_end, server)`, each with
        its step behind or none."""
        listed = list(rows)
        table = np.array(listed, dtype=np.int64).reshape(-1, len(listed[0]) if listed else 6)
        return Tasks(*(np.ascontiguousarray(column) for column in table.T))

    @staticmethod
    def concatenate(tables: Sequence[Tasks]) -> Tasks:
        """Concatenates the rows of several tables, which drop nothing."""
        names = [column.name for column in fields(Tasks) if not column.name.startswith("kept")]
        return Tasks(*(np.concatenate([getattr(t, name) for t in tables]) for name in names))

    @property
    def ends_on_diagonal(self) -> Bools:
        """Whether a task ends on the diagonal, else it is a full rectangle: bool `[tasks]`."""
        return self.q_end == self.kv_end

    def pairs(self, mask: Mask) -> Int64s:
        """Returns the number of visible pairs of each task, `[tasks]`."""
        return mask.pairs(self.q_start, self.q_end, self.kv_start, self.kv_end)

    @property
    def drops(self) -> bool:
        """Whether rows may be dropped: these tasks say how many stay."""
        return self.kept_kv is not None

    def kept_pairs(self, mask: Mask) -> Int64s:
        """Returns the pairs of each task that are computed in each key-value head, `[tasks,
        kv_heads]`: tasks that end on the diagonal keep all. Without drops there is one column."""
        pairs = self.pairs(mask)[:, None]
        if self.kept_q is None or self.kept_kv is None:
            return pairs
        return np.where(self.ends_on_diagonal[:, None], pairs, self.kept_q * self.kept_kv)
