"""What rows are made of, as they leave in messages or become a call's results.

Each kind of source says so as a value, which fused kernels take (`fused_rows.py`), and does the
same by torch's operators, the reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distca.attention.kernel import Outputs
from distca.attention.merge import LseMerge, Sums, merge_shared, sum_parts
from distca.runtime.messages import PackedRows
from distca.runtime.workspace import Workspace


class RowSource(ABC):
    """What the rows of a kind that are sent are made of.

    Attributes:
        at_once: whether all rows must be written by one call, which reduces across rows.
    """

    at_once: bool = False

    @abstractmethod
    def write(self, into: PackedRows, piece: slice, scratch: Workspace) -> None:
        """Writes a slice of the rows, which are sorted by destination, into memory."""


@dataclass(frozen=True)
class SummedRows(RowSource):
    """Rows of each of several tensors, copied or summed.

    Attributes:
        tensors: the tensors, `[parts, ...]`.
        sums: which of their rows each row is made of; None: they are the rows.
    """

    tensors: Sequence[torch.Tensor]
    sums: Sums | None = None

    @property
    def rows(self) -> int:
        if self.sums is None:
            return self.tensors[0].shape[0]
        return (self.sums.parts if self.sums.begins is None else self.sums.begins).shape[0]

    @property
    def at_once(self) -> bool:  # type: ignore[override]
        """See `RowSource.at_once`."""
        return self.sums is not None and self.sums.begins is not None

    def write(self, into: PackedRows, piece: slice, scratch: Workspace) -> None:
        """See `RowSource.write`."""
        for tensor, target in zip(self.tensors, into.tensors, strict=True):
            if self.sums is None:
                target.copy_(tensor[piece])
            elif self.sums.begins is None:
                torch.index_select(tensor, 0, self.sums.parts[piece], out=target)
            else:
                sum_parts(tensor, self.sums, target)

    def make(self) -> list[torch.Tensor]:
        """Returns the rows of each tensor, in new memory."""
        if self.sums is None:
            return [each.clone() for each in self.tensors]
        return [sum_parts(each, self.sums) for each in self.tensors]


@dataclass(frozen=True)
class MergedRows(RowSource):
    """Outputs and their LSE, merged from partial ones.

    Attributes:
        parts: partial outputs and LSE, with room for merged rows behind them.
        merge: which of them each row is made of; None: they are some of the parts.
        own: these parts.
    """

    parts: PackedRows
    merge: LseMerge | None
    own: slice
    at_once = True

    def write(self, into: PackedRows, piece: slice, scratch: Workspace) -> None:
        """See `RowSource.write`."""
        if self.merge is None:
            into.words.copy_(self.parts.words[self.own])
            return
        self._merge(self.merge, scratch)
        torch.index_select(self.parts.words, 0, self.merge.rows, out=into.words)

    def make(self, scratch: Workspace) -> Outputs:
        """Returns outputs and LSE, in new memory."""
        out, lse = self.parts.tensors
        if self.merge is None:
            out, lse = (
                each[self.own].clone(memory_format=torch.contiguous_format) for each in (out, lse)
            )
            return out, lse
        self._merge(self.merge, scratch)
        rows = self.merge.rows
        return torch.index_select(out, 0, rows), torch.index_select(lse, 0, rows)

    def _merge(self, merge: LseMerge, scratch: Workspace) -> None:
        """Merges partial outputs, into the rows that follow them."""
        if merge.merges is None:
            return
        out, lse = (each[: merge.with_merged] for each in self.parts.tensors)

        def gather(rows: torch.Tensor) -> Outputs:
            out, lse = self.parts.gather(rows, scratch).tensors
            return out, lse

        with scratch.borrowed():
            merge_shared(out, lse, merge.merges, gather, scratch.take)


@dataclass(frozen=True)
class WrittenRows(RowSource):
    """Rows that a function computes, by operators of its own.

    Attributes:
        function: `function(into, piece)`.
    """

    function: Callable[[PackedRows, slice], object]

    def write(self, into: PackedRows, piece: slice, scratch: Workspace) -> None:
        """See `RowSource.write`."""
        self.function(into, piece)


NO_ROWS = WrittenRows(lambda into, piece: None)
"""Source of a kind that has no rows."""
