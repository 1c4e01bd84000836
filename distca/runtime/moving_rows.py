"""Rows on their way to the servers and back to their owners; start and wait are separate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distca.runtime.exchange import Exchange, Rows
from distca.runtime.messages import (
    WORD,
    ByKind,
    KindInMessages,
    MessageLayout,
    PackedRows,
    RowFormat,
    RowTypes,
)
from distca.runtime.workspace import Workspace
from distca.transport import Channel, Pending, Transport


@dataclass(frozen=True)
class Fill:
    """What writes a kind's rows that are sent.

    Attributes:
        write: writes some rows of all, sorted by destination: their memory, and which they are.
        at_once: whether all must be written at once.
    """

    write: Callable[[PackedRows, slice], object]
    at_once: bool = False


@dataclass(frozen=True)
class Scattered:
    """Places for packed rows that arrive.

    Attributes:
        words: memory, `[places, words]`.
        places: place of each row, int64 `[rows]`.
        scratch: memory for rows out of messages that hold both kinds.
    """

    words: torch.Tensor
    places: torch.Tensor
    scratch: Workspace

    def fill(self, found: KindInMessages, messages: torch.Tensor) -> None:
        """Writes a kind's rows in messages to their places."""
        for piece, words in found.views(messages):
            self.words.index_copy_(0, self.places[piece], words)
        if found.pieces:
            return
        with self.scratch.borrowed():
            rows = self.scratch.take((found.rows, self.words.shape[1]), WORD)
            found.take(messages, rows)
            self.words.index_copy_(0, self.places, rows)


Target = torch.Tensor | Scattered | Sequence[torch.Tensor] | None
"""Memory for a kind's rows that arrive: words of packed rows, in order or at places, or each
tensor; None: none arrive."""


@dataclass(frozen=True)
class ServedRows:
    """A server's rows of one kind, those that it owns and those that it received, at their places.

    Attributes:
        tensors: tensors with these rows.
        packed: the same rows, side by side; None: nothing arrived, and the tensors are the owner's.
    """

    tensors: Sequence[torch.Tensor]
    packed: PackedRows | None

    def take(self, rows: torch.Tensor | slice, scratch: Workspace) -> Sequence[torch.Tensor]:
        """Copies the rows at int64 indices `[n]`; a slice of them is taken where it lies."""
        if isinstance(rows, slice):
            return [tensor[rows] for tensor in self.tensors]
        if self.packed is None:
            return [scratch.gather(tensor, rows) for tensor in self.tensors]
        return self.packed.gather(rows, scratch).tensors


@dataclass(frozen=True)
class RowsUnderWay:
    """Rows in an exchange, with memory for those that arrive.

    Attributes:
        pending: the exchange; None: no rank sends any row.
        layout: layout of the messages; None, too, if no rank sends any row.
        targets: memory for rows of queries and of keys that arrive.
    """

    pending: Pending | None
    layout: MessageLayout | None
    targets: Sequence[Target]

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
            elif isinstance(target, Scattered):
                target.fill(found, messages)
            else:
                found.take_apart(messages, target)
        self.pending.release()


@dataclass(frozen=True)
class RowsForServers:
    """Rows of several tensors in an exchange to the servers, without memory for arrivals yet.

    Memory is taken later where rows are sent ahead, while an earlier call's rows are still needed.
    """

    pending: Pending | None
    layout: MessageLayout | None
    exchange: Exchange
    tensors: ByKind
    scratch: Workspace

    def put_together(
        self, workspace: Workspace | None
    ) -> tuple[RowsUnderWay, tuple[ServedRows, ServedRows]]:
        """Takes memory for the served rows of each kind, and copies the local rows there.

        Args:
            workspace: memory for the served rows; None: new tensors, which can be kept.
        """
        q, kv = (
            _served(tensors, types, rows, workspace)
            for tensors, types, rows in zip(
                self.tensors,
                self.tensors.row_types,
                (self.exchange.q, self.exchange.kv),
                strict=True,
            )
        )
        targets = [
            self._target(served.packed, rows)
            for served, rows in ((q, self.exchange.q), (kv, self.exchange.kv))
        ]
        return RowsUnderWay(self.pending, self.layout, targets), (q, kv)

    def _target(self, packed: PackedRows | None, rows: Rows) -> Target:
        if packed is None:
            return None
        if rows.places is None:
            return packed.words[rows.local :]
        return Scattered(packed.words, rows.places[rows.local :], self.scratch)


def _served(
    tensors: Sequence[torch.Tensor],
    types: tuple[tuple[torch.Size, torch.dtype], ...],
    rows: Rows,
    workspace: Workspace | None,
) -> ServedRows:
    """Memory for served rows, with the local ones in place."""
    if not tensors or not rows.received:
        return ServedRows(tensors, None)
    row = RowFormat.of(types)
    if workspace is None:
        words = tensors[0].new_empty((rows.served, row.words), dtype=WORD)
        packed = PackedRows.at(words, row)
    else:
        packed = PackedRows.take(workspace, row, rows.served)
    if rows.local:
        for tensor, into in zip(tensors, packed.tensors, strict=True):
            if rows.places is None:
                into[: rows.local] = tensor
            else:
                into.index_copy_(0, rows.places[: rows.local], tensor)
    return ServedRows(packed.tensors, packed)


def _start_exchange(
    transport: Transport,
    phase: str,
    channel: Channel,
    layout: MessageLayout,
    fills: Sequence[Fill],
    scratch: Workspace,
) -> Pending:
    """Starts to send rows, sorted by destination."""
    messages = transport.staging(channel, layout.sizes.sent).view(WORD)
    for found, fill in zip(layout.send, fills, strict=True):
        if found.rows:
            _write(messages, found, fill, scratch)
    return transport.start(phase, channel, layout.sizes)


def _write(messages: torch.Tensor, found: KindInMessages, fill: Fill, scratch: Workspace) -> None:
    if len(found.pieces) == 1 or (found.pieces and not fill.at_once):
        for piece, words in found.views(messages):
            fill.write(PackedRows.at(words, found.format), piece)
        return
    with scratch.borrowed():
        rows = PackedRows.take(scratch, found.format, found.rows)
        fill.write(rows, slice(0, found.rows))
        found.put(messages, rows.words)


def _any_moves(exchange: Exchange, types: RowTypes) -> bool:
    """Whether any rank sends any row. On a GPU's stream even an empty exchange would wait for
    those before it."""
    return bool((types[0] and exchange.q.move) or (types[1] and exchange.kv.move))


def send_to_servers(
    transport: Transport,
    phase: str,
    slot: int,
    exchange: Exchange,
    tensors: ByKind,
    scratch: Workspace,
) -> RowsForServers:
    """Starts to send each tensor's rows to the servers.

    Args:
        transport: transport of the rows.
        phase: phase of the exchange, under which bytes are counted.
        slot: slot of the channel.
        exchange: this rank's part of the plan.
        tensors: local rows `[local, ...]`.
        scratch: memory for rows on their way out.
    """

    def gathered(sources: Sequence[torch.Tensor], rows: torch.Tensor) -> Fill:
        def write(into: PackedRows, piece: slice) -> None:
            for tensor, target in zip(sources, into.tensors, strict=True):
                torch.index_select(tensor, 0, rows[piece], out=target)

        return Fill(write)

    types = tensors.row_types
    pending = layout = None
    if _any_moves(exchange, types):
        channel = Channel("to servers", slot)
        layout = exchange.layout(channel.direction, types)
        fills = gathered(tensors.q, exchange.q.send), gathered(tensors.kv, exchange.kv.send)
        pending = _start_exchange(transport, phase, channel, layout, fills, scratch)
    return RowsForServers(pending, layout, exchange, tensors, scratch)


def send_to_owners(
    transport: Transport,
    phase: str,
    slot: int,
    exchange: Exchange,
    types: RowTypes,
    fills: Sequence[Fill],
    targets: Sequence[Target],
    scratch: Workspace,
) -> RowsUnderWay:
    """Starts to send the results of received rows back to the rows' owners.

    Args:
        transport: transport of the rows.
        phase: phase of the exchange, under which bytes are counted.
        slot: slot of the channel.
        exchange: this rank's part of the plan.
        types: rows of the results.
        fills: what writes the results of received queries, and those of keys.
        targets: memory for what comes back, `[sent, ...]`.
        scratch: memory for rows on their way out.
    """
    pending = layout = None
    if _any_moves(exchange, types):
        channel = Channel("to owners", slot)
        layout = exchange.layout(channel.direction, types)
        pending = _start_exchange(transport, phase, channel, layout, fills, scratch)
    return RowsUnderWay(pending, layout, targets)
