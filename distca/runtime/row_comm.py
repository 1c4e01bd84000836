"""Rows on their way to the servers and back to their owners; start and wait are separate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from distca.runtime.exchange import (
    CallRows,
    Exchange,
    Gather,
    GatherBoth,
    Piece,
    Pieces,
    Rows,
)
from distca.runtime.messages import (
    WORD,
    KindLayout,
    MessageLayout,
    PackedRows,
    QAndKV,
    RowFormat,
    RowTypes,
    row_types,
)
from distca.runtime.workspace import Workspace
from distca.transport import Channel, Pending, Transport


@dataclass(frozen=True)
class RowWriter:
    """Writes the rows of a kind that are sent into messages.

    Attributes:
        write: function `write(into, rows)` that copies a slice of the rows to send into memory;
            they are sorted by destination.
        at_once: whether `write` reduces across rows, so that one call must write all of them.
    """

    write: Callable[[PackedRows, slice], object]
    at_once: bool = False


RecvRows = torch.Tensor | Sequence[torch.Tensor] | None
"""Memory for a kind's rows that arrive: words of packed rows, or each tensor; None: none arrive."""


@dataclass(frozen=True)
class ServedRows:
    """A server's rows of one kind: those that it owns, and those received, each in their memory.

    Attributes:
        local: tensors of its own rows, which stay where their owner has them.
        received: rows that it received, side by side; None: nothing arrived.
        latents: latents that arrived, of which the received rows are to be made
            (`latent_rows.py`); None: rows arrive themselves, or none do.
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


@dataclass(frozen=True)
class PendingRows:
    """Rows in an exchange, with memory for those that arrive.

    Attributes:
        pending: the exchange; None: no rank sends any row.
        layout: layout of the messages; None, too, if no rank sends any row.
        targets: memory for rows of queries and of keys that arrive.
    """

    pending: Pending | None
    layout: MessageLayout | None
    targets: Sequence[RecvRows]

    def wait(self) -> None:
        """Waits for the exchange, and completes the targets."""
        if self.pending is None or self.layout is None:
            return
        messages = self.pending.wait().view(WORD)
        for found, target in zip(self.layout.receive, self.targets, strict=True):
            if not found.rows or target is None:
                continue
            if isinstance(target, torch.Tensor):
                found.take(messages, target)
            else:
                found.take_apart(messages, target)
        self.pending.release()


@dataclass(frozen=True)
class DispatchedRows:
    """Rows of several tensors in an exchange to the servers, without memory for arrivals yet.

    Memory is taken later where rows are prefetched, while an earlier call's rows are still needed.

    Attributes:
        pending: the exchange; None: no rank sends any row.
        layout: layout of the messages; None, too, if no rank sends any row.
        exchange: this rank's part of the plan.
        tensors: local rows that travel.
        expanded: local keys and values, where their latents travel; none: they do so themselves.
    """

    pending: Pending | None
    layout: MessageLayout | None
    exchange: Exchange
    tensors: QAndKV
    expanded: Sequence[torch.Tensor]

    def receive(
        self, workspace: Workspace | None
    ) -> tuple[PendingRows, tuple[ServedRows, ServedRows]]:
        """Takes memory for the received rows of each kind.

        Args:
            workspace: memory for them; None: new tensors, which can be kept.
        """
        of_q, of_kv = self.exchange.q, self.exchange.kv
        q = _served(self.tensors.q, of_q, workspace)
        kv = _served(self.expanded or self.tensors.kv, of_kv, workspace)
        if self.expanded and of_kv.received:
            kv = replace(kv, latents=_memory(self.tensors.kv, of_kv.received, workspace))
        return PendingRows(self.pending, self.layout, [_target(q), _target(kv)]), (q, kv)


def _target(served: ServedRows) -> RecvRows:
    """Returns the memory for what arrives of a kind."""
    arriving = served.latents or served.received
    return None if arriving is None else arriving.words


def _memory(like: Sequence[torch.Tensor], rows: int, workspace: Workspace | None) -> PackedRows:
    """Returns the memory for rows of such tensors, side by side: of a workspace, or new."""
    row = RowFormat.of(row_types(like))
    if workspace is None:
        return PackedRows.at(like[0].new_empty((rows, row.words), dtype=WORD), row)
    return PackedRows.take(workspace, row, rows)


def _served(tensors: Sequence[torch.Tensor], rows: Rows, workspace: Workspace | None) -> ServedRows:
    """Returns the local rows, with memory for those that arrive."""
    if not tensors or not rows.received:
        return ServedRows(tensors, None)
    return ServedRows(tensors, _memory(tensors, rows.received, workspace))


def _start_exchange(
    transport: Transport,
    phase: str,
    channel: Channel,
    exchange: Exchange,
    types: RowTypes,
    writers: Sequence[RowWriter],
    scratch: Workspace,
) -> tuple[Pending, MessageLayout] | tuple[None, None]:
    """Starts to send rows, sorted by destination, unless no rank sends any row.

    On a GPU's stream even an empty exchange would wait for those before it.
    """
    if not ((types[0] and exchange.q.move) or (types[1] and exchange.kv.move)):
        return None, None
    layout = exchange.layout(channel.direction, types)
    messages = transport.staging(channel, layout.sizes.sent).view(WORD)
    for found, writer in zip(layout.send, writers, strict=True):
        if found.rows:
            _write(messages, found, writer, scratch)
    return transport.start(phase, channel, layout.sizes), layout


def _write(
    messages: torch.Tensor, found: KindLayout, writer: RowWriter, scratch: Workspace
) -> None:
    if len(found.pieces) == 1 or (found.pieces and not writer.at_once):
        for piece, words in found.views(messages):
            writer.write(PackedRows.at(words, found.format), piece)
        return
    with scratch.borrowed():
        rows = PackedRows.take(scratch, found.format, found.rows)
        writer.write(rows, slice(0, found.rows))
        found.put(messages, rows.words)


def start_dispatch(
    transport: Transport,
    phase: str,
    slot: int,
    exchange: Exchange,
    tensors: QAndKV,
    scratch: Workspace,
    expanded: Sequence[torch.Tensor] = (),
) -> DispatchedRows:
    """Starts to send each tensor's rows to the servers.

    Args:
        transport: transport of the rows.
        phase: phase of the exchange, under which bytes are counted.
        slot: slot of the channel.
        exchange: this rank's part of the plan.
        tensors: local rows `[local, ...]`.
        scratch: memory for rows on their way out.
        expanded: local keys and values, where `tensors` has their latents.
    """

    def gathered(sources: Sequence[torch.Tensor], rows: torch.Tensor) -> RowWriter:
        def write(into: PackedRows, piece: slice) -> None:
            for tensor, target in zip(sources, into.tensors, strict=True):
                torch.index_select(tensor, 0, rows[piece], out=target)

        return RowWriter(write)

    writers = gathered(tensors.q, exchange.q.send), gathered(tensors.kv, exchange.kv.send)
    pending, layout = _start_exchange(
        transport, phase, Channel("dispatch", slot), exchange, tensors.row_types, writers, scratch
    )
    return DispatchedRows(pending, layout, exchange, tensors, expanded)


def start_combine(
    transport: Transport,
    phase: str,
    slot: int,
    exchange: Exchange,
    types: RowTypes,
    writers: Sequence[RowWriter],
    targets: Sequence[RecvRows],
    scratch: Workspace,
) -> PendingRows:
    """Starts to send the results of received rows back to the rows' owners.

    Args:
        transport: transport of the rows.
        phase: phase of the exchange, under which bytes are counted.
        slot: slot of the channel.
        exchange: this rank's part of the plan.
        types: rows of the results.
        writers: write the results of received queries, and those of keys.
        targets: memory for what comes back, `[sent, ...]`.
        scratch: memory for rows on their way out.
    """
    pending, layout = _start_exchange(
        transport, phase, Channel("combine", slot), exchange, types, writers, scratch
    )
    return PendingRows(pending, layout, targets)
