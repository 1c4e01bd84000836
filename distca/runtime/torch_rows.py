"""`RowKernels` by torch's operators: the reference, and what runs on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.attention.kernel import Outputs
from distca.runtime.exchange import CallRows
from distca.runtime.messages import KindLayout, PackedRows
from distca.runtime.row_kernels import RecvRows
from distca.runtime.row_sources import MergedRows, RowSource, SummedRows
from distca.runtime.served_rows import ServedRows
from distca.runtime.workspace import Workspace


class TorchRowKernels:
    """See `RowKernels`."""

    def pack(
        self,
        messages: torch.Tensor,
        kinds: Sequence[tuple[KindLayout, RowSource]],
        scratch: Workspace,
    ) -> None:
        """See `RowKernels.pack`."""
        for found, source in kinds:
            if found.rows:
                _write(messages, found, source, scratch)

    def unpack(self, messages: torch.Tensor, kinds: Sequence[tuple[KindLayout, RecvRows]]) -> None:
        """See `RowKernels.unpack`."""
        for found, target in kinds:
            if not found.rows or target is None:
                continue
            if isinstance(target, torch.Tensor):
                found.take(messages, target)
            else:
                found.take_apart(messages, target)

    def take(
        self, kinds: Sequence[tuple[ServedRows, CallRows]], scratch: Workspace
    ) -> list[torch.Tensor]:
        """See `RowKernels.take`."""
        return [tensor for served, rows in kinds for tensor in served.take(rows, scratch)]

    def merge(self, source: MergedRows, scratch: Workspace) -> Outputs:
        """See `RowKernels.merge`."""
        return source.make(scratch)

    def sum(self, sources: Sequence[SummedRows]) -> list[torch.Tensor]:
        """See `RowKernels.sum`."""
        return [tensor for each in sources for tensor in each.make()]


def _write(
    messages: torch.Tensor, found: KindLayout, source: RowSource, scratch: Workspace
) -> None:
    if len(found.pieces) == 1 or (found.pieces and not source.at_once):
        for piece, words in found.views(messages):
            source.write(PackedRows.at(words, found.format), piece, scratch)
        return
    with scratch.borrowed():
        rows = PackedRows.take(scratch, found.format, found.rows)
        source.write(rows, slice(0, found.rows), scratch)
        found.put(messages, rows.words)
