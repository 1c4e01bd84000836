"""Rows on their way to the servers and back to their owners; start and wait are separate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from distca.attention.merge import Sums
from distca.runtime.exchange import Exchange, Rows
from distca.runtime.messages import (
    WORD,
    MessageLayout,
    PackedRows,
    QAndKV,
    RowFormat,
    RowTypes,
    row_types,
)
from distca.runtime.row_kernels import RecvRows, RowKernels, ServedRows
from distca.runtime.row_sources import RowSource, SummedRows
from distca.runtime.workspace import Workspace
from distca.transport import Channel, Pending, Transport


@dataclass(frozen=True)
class PendingRows:
    """Rows in an exchange, with memory for those that arrive.

    Attributes:
        pending: the exchange; None: no rank sends any row.
        layout: layout of the messages; None, too, if no rank sends any row.
        targets: memory for rows of queries and of keys that arrive.
        kernels: what reads them from messages.
    """

    pending: Pending | None
    layout: MessageLayout | None
    targets: Sequence[RecvRows]
    kernels: RowKernels

    def wait(self) -> None:
        """Waits for the exchange, and completes the targets."""
        if self.pending is None or self.layout is None:
            return
        messages = self.pending.wait().view(WORD)
        self.kernels.unpack(messages, list(zip(self.layout.receive, self.targets, strict=True)))
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
        kernels: what reads rows from messages.
    """

    pending: Pending | None
    layout: MessageLayout | None
    exchange: Exchange
    tensors: QAndKV
    expanded: Sequence[torch.Tensor]
    kernels: RowKernels

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
        targets = [_target(each) for each in (q, kv)]
        return PendingRows(self.pending, self.layout, targets, self.kernels), (q, kv)


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
    sources: Sequence[RowSource],
    kernels: RowKernels,
    scratch: Workspace,
) -> tuple[Pending, MessageLayout] | tuple[None, None]:
    """Starts to send rows, sorted by destination, unless no rank sends any row.

    On a GPU's stream even an empty exchange would wait for those before it.
    """
    if not ((types[0] and exchange.q.move) or (types[1] and exchange.kv.move)):
        return None, None
    layout = exchange.layout(channel.direction, types)
    messages = transport.staging(channel, layout.sizes.sent).view(WORD)
    kernels.pack(messages, list(zip(layout.send, sources, strict=True)), scratch)
    return transport.start(phase, channel, layout.sizes), layout


def start_dispatch(
    transport: Transport,
    phase: str,
    slot: int,
    exchange: Exchange,
    tensors: QAndKV,
    kernels: RowKernels,
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
        kernels: what writes rows into messages, and reads them there.
        scratch: memory for rows on their way out.
        expanded: local keys and values, where `tensors` has their latents.
    """

    sources = [
        SummedRows(of_kind, Sums(rows.send, None))
        for of_kind, rows in zip(tensors, (exchange.q, exchange.kv), strict=True)
    ]
    pending, layout = _start_exchange(
        transport,
        phase,
        Channel("dispatch", slot),
        exchange,
        tensors.row_types,
        sources,
        kernels,
        scratch,
    )
    return DispatchedRows(pending, layout, exchange, tensors, expanded, kernels)


def start_combine(
    transport: Transport,
    phase: str,
    slot: int,
    exchange: Exchange,
    types: RowTypes,
    sources: Sequence[RowSource],
    targets: Sequence[RecvRows],
    kernels: RowKernels,
    scratch: Workspace,
) -> PendingRows:
    """Starts to send the results of received rows back to the rows' owners.

    Args:
        transport: transport of the rows.
        phase: phase of the exchange, under which bytes are counted.
        slot: slot of the channel.
        exchange: this rank's part of the plan.
        types: rows of the results.
        sources: what the results of received queries, and those of keys, are made of.
        targets: memory for what comes back, `[sent, ...]`.
        kernels: what writes rows into messages, and reads them there.
        scratch: memory for rows on their way out.
    """
    pending, layout = _start_exchange(
        transport, phase, Channel("combine", slot), exchange, types, sources, kernels, scratch
    )
    return PendingRows(pending, layout, targets, kernels)
