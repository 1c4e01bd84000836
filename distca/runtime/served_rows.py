"""Rows that a server has for its kernels, and how torch's operators take those of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from distca.runtime.exchange import CallRows, Gather, GatherBoth, Piece, Pieces
from distca.runtime.messages import PackedRows
from distca.runtime.workspace import Workspace


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
        """Returns rows of a call: those of one piece where they lie, others in copies."""
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
