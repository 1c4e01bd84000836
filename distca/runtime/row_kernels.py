"""What moves rows between tensors, messages and kernel calls, and makes rows of their parts.

`TorchRowKernels` does it by torch's operators. It is the reference, and what runs on CPUs.
`fused_rows.py` does it by fused kernels, one launch for each method, and chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from distca.attention.kernel import Outputs
from distca.runtime.exchange import CallRows, Gather, GatherBoth, Piece, Pieces
from distca.runtime.messages import KindLayout, PackedRows
from distca.runtime.row_sources import MergedRows, RowSource, SummedRows
from distca.runtime.workspace import Workspace

RecvRows = torch.Tensor | Sequence[torch.Tensor] | None
"""Memory for a kind's rows that arrive: words of packed rows, or each tensor; None: none arrive."""


@dataclass(frozen=True)
class ServedRows:
    """A server's rows of one kind: those that it owns, and those received, each in their memory.

    Attributes:
        local: tensors of its own rows, which stay where their owner has them.
        received: rows that it received, side by side; None: nothing arrived.
        latents: latents that arrived, from which `latent_rows.py` makes the received rows; None:
            rows arrive themselves, or none do.
    """

    local: Sequence[torch.Tensor]
    received: PackedRows | None
    latents: PackedRows | None = None

    def take(self, rows: CallRows, scratch: Workspace) -> Sequence[torch.Tensor]:
        """Returns rows of a call by torch's operators: those of one piece where they lie, others in
        copies."""
        if isinstance(rows, Piece):
            return [tensor[rows.rows] for tensor in self._memory(rows.received)]
        if isinstance(rows, Gather):
            if rows.received:
                return self._received.gather(rows.rows, scratch).tensors
            return [scratch.gather(tensor, rows.rows) for tensor in self.local]
        total = rows.total if isinstance(rows, Pieces) else rows.most.rows.shape[0]
        into = PackedRows.take(scratch, self._received.format, total)
        if isinstance(rows, Pieces):
            self._copy(rows.pieces, into)
        else:
            self._gather_both(rows, into, scratch)
        return into.tensors

    @property
    def _received(self) -> PackedRows:
        assert self.received is not None
        return self.received

    def _memory(self, received: bool) -> Sequence[torch.Tensor]:
        return self._received.tensors if received else self.local

    def _pairs(
        self, received: bool, into: PackedRows
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of one memory and those to which its rows go: packed rows need one copy."""
        if received:
            return [(self._received.words, into.words)]
        return zip(self.local, into.tensors, strict=True)

    def _copy(self, pieces: Sequence[Piece], into: PackedRows) -> None:
        begin = 0
        for piece in pieces:
            end = begin + piece.rows.stop - piece.rows.start
            for tensor, target in self._pairs(piece.received, into):
                target[begin:end] = tensor[piece.rows]
            begin = end

    def _gather_both(self, rows: GatherBoth, into: PackedRows, scratch: Workspace) -> None:
        self._gather_into(rows.most, into)
        with scratch.borrowed():
            others = PackedRows.take(scratch, into.format, rows.places.shape[0])
            self._gather_into(rows.others, others)
            into.words.index_copy_(0, rows.places, others.words)

    def _gather_into(self, rows: Gather, into: PackedRows) -> None:
        for tensor, target in self._pairs(rows.received, into):
            torch.index_select(tensor, 0, rows.rows, out=target)


class RowKernels(Protocol):
    """Operations on rows. Messages are words, `distca.runtime.messages.WORD`."""

    def pack(
        self,
        messages: torch.Tensor,
        kinds: Sequence[tuple[KindLayout, RowSource]],
        scratch: Workspace,
    ) -> None:
        """Writes the rows of each kind into messages.

        Args:
            messages: messages that are sent.
            kinds: where the rows of queries, and of keys, lie in messages; what they are made of.
            scratch: memory for temporaries.
        """
        ...

    def unpack(self, messages: torch.Tensor, kinds: Sequence[tuple[KindLayout, RecvRows]]) -> None:
        """Reads the rows of each kind from messages to memory for them."""
        ...

    def take(
        self, kinds: Sequence[tuple[ServedRows, CallRows]], scratch: Workspace
    ) -> list[torch.Tensor]:
        """Returns a kernel call's rows of each tensor of each kind.

        Those of one piece stay where they lie, and others are copied to scratch memory.
        """
        ...

    def merge(self, source: MergedRows, scratch: Workspace) -> Outputs:
        """Returns merged outputs and LSE, in new memory."""
        ...

    def sum(self, sources: Sequence[SummedRows]) -> list[torch.Tensor]:
        """Returns the rows of each tensor of each source, in new memory."""
        ...


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
