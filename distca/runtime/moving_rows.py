"""Rows on their way to the servers and back to their owners, started and waited for apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.attention.merge import merge_partial
from distca.runtime.exchange import Exchange, Rows
from distca.runtime.messages import Field, message_sizes, pack, unpack
from distca.runtime.workspace import Workspace
from distca.transport import Channel, Pending, Transport


@dataclass(frozen=True)
class RowsUnderWay:
    """Rows of several tensors that were sent, and where those that arrive go.

    There is nothing to wait for where no rank sends any.
    """

    pending: Pending | None
    incoming: list[tuple[Field, torch.Tensor]]
    result: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """The tensors that the sender of these rows was promised, complete."""
        if self.pending is not None:
            unpack(self.pending.wait(), self.incoming)
            self.pending.release()
        return self.result


@dataclass(frozen=True)
class RowsForServers:
    """Rows of several tensors that were sent to the servers; there is no room for others' yet."""

    pending: Pending | None
    tensors: list[tuple[torch.Tensor, Rows]]

    def put_together(self, slot: Workspace | None) -> RowsUnderWay:
        """Makes room, and puts the local rows there.

        Args:
            slot: what the rows are put together in; None: tensors of their own, that can be kept.
        """
        incoming, served = [], []
        for tensor, rows in self.tensors:
            row_shape = tuple(tensor.shape[1:])
            everything = tensor
            if rows.received or not tensor.is_contiguous():
                everything = (
                    tensor.new_empty((rows.served, *row_shape))
                    if slot is None
                    else slot.rows(tensor, rows.served)
                )
                everything[: rows.local] = tensor
            field = Field(rows.receive_counts, (), row_shape, tensor.dtype)
            incoming.append((field, everything[rows.local :]))
            served.append(everything)
        return RowsUnderWay(self.pending, incoming, served)


def _start(
    transport: Transport,
    phase: str,
    channel: Channel,
    outgoing: list[tuple[Field, torch.Tensor]],
    incoming: list[Field],
    move: bool,
) -> Pending | None:
    if not move:
        # An empty exchange would still wait for its turn behind others on a GPU's stream.
        return None
    sizes = message_sizes([field for field, _ in outgoing], incoming)
    pack(outgoing, transport.staging(channel, sum(sizes.send)))
    return transport.start(phase, channel, sizes)


def send_to_servers(
    transport: Transport,
    phase: str,
    number: int,
    tensors: list[tuple[torch.Tensor, Rows]],
    scratch: Workspace,
) -> RowsForServers:
    """Each tensor's served rows: its local rows `[local, ...]`, then what other ranks sent.

    Args:
        transport: what moves them.
        phase: of the exchange.
        number: of the slot.
        tensors: local rows.
        scratch: for rows on their way out.
    """
    outgoing, incoming = [], []
    with scratch.borrowed():
        for tensor, rows in tensors:
            row_shape = tuple(tensor.shape[1:])
            field = Field(rows.send_counts, rows.sent_before, row_shape, tensor.dtype)
            outgoing.append((field, scratch.gather(tensor, rows.send)))
            incoming.append(Field(rows.receive_counts, (), row_shape, tensor.dtype))
        move = any(rows.move for _, rows in tensors)
        channel = Channel("to servers", number)
        pending = _start(transport, phase, channel, outgoing, incoming, move)
    return RowsForServers(pending, tensors)


def send_to_owners(
    transport: Transport,
    phase: str,
    number: int,
    tensors: Sequence[tuple[torch.Tensor, Rows]],
    slot: Workspace,
    scratch: Workspace,
    dtype: torch.dtype | None = None,
) -> RowsUnderWay:
    """The way back: rows that arrived go home. Each tensor holds served rows.

    With a `dtype` they travel as that; only the rows that travel are copied. What comes back for
    each tensor is `[sum(send_counts), ...]`. The other arguments are those of `send_to_servers`.
    """
    outgoing, incoming = [], []
    with scratch.borrowed():
        for tensor, rows in tensors:
            travelling = tensor[rows.local :]
            if dtype not in (None, tensor.dtype):
                travelling = scratch.copy(travelling, dtype)
            row_shape = tuple(tensor.shape[1:])
            outgoing.append(
                (
                    Field(rows.receive_counts, rows.returned_before, row_shape, travelling.dtype),
                    travelling,
                )
            )
            incoming.append(
                (
                    Field(rows.send_counts, (), row_shape, travelling.dtype),
                    slot.rows(travelling, sum(rows.send_counts)),
                )
            )
        move = any(rows.move for _, rows in tensors)
        channel, fields = Channel("to owners", number), [field for field, _ in incoming]
        pending = _start(transport, phase, channel, outgoing, fields, move)
        return RowsUnderWay(pending, incoming, [rows for _, rows in incoming])


def merge_returned(
    exchange: Exchange,
    served: tuple[torch.Tensor, torch.Tensor],
    back: Sequence[torch.Tensor],
    slot: Workspace,
    scratch: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The final output and LSE of the local rows, partial ones merged.

    Args:
        exchange: whose rows they are.
        served: output and LSE of the served rows.
        back: output and LSE of the rows that come back.
        slot: what `served` may lie in; the result does not.
        scratch: for what is computed on the way.
    """
    local = exchange.q.local
    # The received rows' part is dropped, so that the saved outputs do not keep it alive.
    out, lse = (
        rows[:local].clone() if exchange.q.received or slot.owns(rows) else rows for rows in served
    )
    back_out, back_lse = back
    start = 0
    for arrival in exchange.arrivals:
        end = start + exchange.q.send_counts[arrival.server]
        rows = exchange.q.send[start:end]
        part_out, part_lse = back_out[start:end], back_lse[start:end]
        with scratch.borrowed():
            first = scratch.gather(rows, arrival.first)
            out.index_copy_(0, first, scratch.gather(part_out, arrival.first))
            lse.index_copy_(0, first, scratch.gather(part_lse, arrival.first))
        if len(arrival.repeated):
            with scratch.borrowed():
                merge_partial(
                    out,
                    lse,
                    scratch.gather(rows, arrival.repeated),
                    scratch.gather(part_out, arrival.repeated),
                    scratch.gather(part_lse, arrival.repeated),
                    scratch.take,
                )
        start = end
    return out, lse


def add_returned(
    exchange: Exchange,
    gradients: Sequence[torch.Tensor],
    back: Sequence[torch.Tensor],
    scratch: Workspace,
) -> tuple[torch.Tensor, ...]:
    """The gradients of the local rows: this server's own and what the others return."""
    local = []
    all_rows = (exchange.q, exchange.kv, exchange.kv)
    for gradient, rows, parts in zip(gradients, all_rows, back, strict=True):
        total = gradient[: rows.local]
        start = 0
        for count in rows.send_counts:
            # One server's rows are distinct, so the order of the sums is fixed on GPUs, too.
            end = start + count
            if count:
                with scratch.borrowed():
                    part = scratch.copy(parts[start:end], total.dtype)
                    total.index_add_(0, rows.send[start:end], part)
            start = end
        local.append(total.to(parts.dtype, copy=True))
    return tuple(local)
