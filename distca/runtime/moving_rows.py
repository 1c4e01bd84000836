"""Rows on their way to the servers and back to their owners; start and wait are separate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    row_types,
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
        latents: latents that arrived, in the order of their arrival, of which the received rows are
            to be made (`latent_rows.py`); None: rows arrive themselves, or none do.
    """

    tensors: Sequence[torch.Tensor]
    packed: PackedRows | None
    latents: PackedRows | None = None

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

    Attributes:
        pending: the exchange; None: no rank sends any row.
        layout: layout of the messages; None, too, if no rank sends any row.
        exchange: this rank's part of the plan.
        tensors: local rows that travel.
        expanded: local keys and values, where their latents travel; none: they do so themselves.
        scratch: memory for rows out of messages that hold both kinds.
    """

    pending: Pending | None
    layout: MessageLayout | None
    exchange: Exchange
    tensors: ByKind
    expanded: Sequence[torch.Tensor]
    scratch: Workspace

    def put_together(
        self, workspace: Workspace | None
    ) -> tuple[RowsUnderWay, tuple[ServedRows, ServedRows]]:
        """Takes memory for the served rows of each kind, and copies the local rows there.

        Args:
            workspace: memory for the served rows; None: new tensors, which can be kept.
        """
        of_q, of_kv = self.exchange.q, self.exchange.kv
        q = _served(self.tensors.q, of_q, workspace)
        kv = _served(self.expanded or self.tensors.kv, of_kv, workspace)
        if self.expanded and of_kv.received:
            kv = replace(kv, latents=_memory(self.tensors.kv, of_kv.received, workspace))
        targets = [self._target(q, of_q), self._target(kv, of_kv)]
        return RowsUnderWay(self.pending, self.layout, targets), (q, kv)

    def _target(self, served: ServedRows, rows: Rows) -> Target:
        if served.latents is not None:
            return served.latents.words
        packed = served.packed
        if packed is None:
            return None
        if rows.places is None:
            return packed.words[rows.local :]
        return Scattered(packed.words, rows.places[rows.local :], self.scratch)


def _memory(like: Sequence[torch.Tensor], rows: int, workspace: Workspace | None) -> PackedRows:
    """Memory for rows of such tensors, side by side: of a workspace, or new."""
    row = RowFormat.of(row_types(like))
    if workspace is None:
        return PackedRows.at(like[0].new_empty((rows, row.words), dtype=WORD), row)
    return PackedRows.take(workspace, row, rows)


def _served(tensors: Sequence[torch.Tensor], rows: Rows, workspace: Workspace | None) -> ServedRows:
    """Memory for served rows, with the local ones in place."""
    if not tensors or not rows.received:
        return ServedRows(tensors, None)
    packed = _memory(tensors, rows.served, workspace)
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
    expanded: Sequence[torch.Tensor] = (),
) -> RowsForServers:
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
    return RowsForServers(pending, layout, exchange, tensors, expanded, scratch)


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
