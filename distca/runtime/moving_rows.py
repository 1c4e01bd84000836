"""Rows on their way to the servers and back to their owners; start and wait are separate."""

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
    """Rows of several tensors in an exchange, with memory for those that arrive.

    Attributes:
        pending: the exchange; None: no rank sends any row.
        incoming: fields of the messages that arrive, and the rows that they fill.
        result: whole tensors, which `incoming` fills in part.
    """

    pending: Pending | None
    incoming: list[tuple[Field, torch.Tensor]]
    result: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """Waits for the exchange, and returns the completed tensors."""
        if self.pending is not None:
            unpack(self.pending.wait(), self.incoming)
            self.pending.release()
        return self.result


@dataclass(frozen=True)
class RowsForServers:
    """Rows of several tensors in an exchange to the servers, without memory for arrivals yet.

    Memory is taken later where rows are sent ahead, while an earlier call's rows are still needed.
    """

    pending: Pending | None
    tensors: list[tuple[torch.Tensor, Rows]]

    def put_together(self, workspace: Workspace | None) -> RowsUnderWay:
        """Takes memory for each tensor's served rows, and copies the local rows there.

        Args:
            workspace: memory for the served rows; None: new tensors, which can be kept.
        """
        incoming, served = [], []
        for tensor, rows in self.tensors:
            row_shape = tuple(tensor.shape[1:])
            everything = tensor
            if rows.received or not tensor.is_contiguous():
                everything = (
                    tensor.new_empty((rows.served, *row_shape))
                    if workspace is None
                    else workspace.rows(tensor, rows.served)
                )
                everything[: rows.local] = tensor
            field = Field(rows.receive_counts, (), row_shape, tensor.dtype)
            incoming.append((field, everything[rows.local :]))
            served.append(everything)
        return RowsUnderWay(self.pending, incoming, served)


def _start_exchange(
    transport: Transport,
    phase: str,
    channel: Channel,
    outgoing: list[tuple[Field, torch.Tensor]],
    incoming: list[Field],
    move: bool,
) -> Pending | None:
    if not move:
        # On a GPU's stream even an empty exchange would wait for those before it.
        return None
    sizes = message_sizes([field for field, _ in outgoing], incoming)
    pack(outgoing, transport.staging(channel, sum(sizes.send)))
    return transport.start(phase, channel, sizes)


def send_to_servers(
    transport: Transport,
    phase: str,
    slot: int,
    tensors: list[tuple[torch.Tensor, Rows]],
    scratch: Workspace,
) -> RowsForServers:
    """Starts to send each tensor's rows to the servers.

    Args:
        transport: transport of the rows.
        phase: phase of the exchange, under which bytes are counted.
        slot: slot of the channel.
        tensors: local rows `[local, ...]`, and how they travel.
        scratch: memory for rows on their way out.
    """
    outgoing, incoming = [], []
    with scratch.borrowed():
        for tensor, rows in tensors:
            row_shape = tuple(tensor.shape[1:])
            field = Field(rows.send_counts, rows.sent_before, row_shape, tensor.dtype)
            outgoing.append((field, scratch.gather(tensor, rows.send)))
            incoming.append(Field(rows.receive_counts, (), row_shape, tensor.dtype))
        move = any(rows.move for _, rows in tensors)
        channel = Channel("to servers", slot)
        pending = _start_exchange(transport, phase, channel, outgoing, incoming, move)
    return RowsForServers(pending, tensors)


def send_to_owners(
    transport: Transport,
    phase: str,
    slot: int,
    tensors: Sequence[tuple[torch.Tensor, Rows]],
    workspace: Workspace,
    scratch: Workspace,
    dtype: torch.dtype | None = None,
) -> RowsUnderWay:
    """Starts to send the results of received rows back to the rows' owners.

    Each tensor holds the results of served rows, `[served, ...]`; `[sum(send_counts), ...]` comes
    back, in `workspace`. Rows that travel are first copied to `dtype`, if it is given. The other
    arguments are those of `send_to_servers`.
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
                    workspace.rows(travelling, sum(rows.send_counts)),
                )
            )
        move = any(rows.move for _, rows in tensors)
        channel, fields = Channel("to owners", slot), [field for field, _ in incoming]
        pending = _start_exchange(transport, phase, channel, outgoing, fields, move)
        return RowsUnderWay(pending, incoming, [rows for _, rows in incoming])


def merge_returned(
    exchange: Exchange,
    served: tuple[torch.Tensor, torch.Tensor],
    returned: Sequence[torch.Tensor],
    workspace: Workspace,
    scratch: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The final output and LSE of the local rows, partial ones merged.

    Args:
        exchange: this rank's part of the plan.
        served: output and LSE of the served rows.
        returned: output and LSE of the rows that come back.
        workspace: memory in which `served` may lie; the result does not.
        scratch: memory for temporaries.
    """
    local = exchange.q.local
    # Local rows are cloned, so that the saved outputs do not keep the received rows' part alive.
    out, lse = (
        rows[:local].clone() if exchange.q.received or workspace.owns(rows) else rows
        for rows in served
    )
    returned_out, returned_lse = returned
    start = 0
    for arrival in exchange.arrivals:
        end = start + exchange.q.send_counts[arrival.server]
        rows = exchange.q.send[start:end]
        part_out, part_lse = returned_out[start:end], returned_lse[start:end]
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
    returned: Sequence[torch.Tensor],
    scratch: Workspace,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the local rows: the sums of this server's and those that others return."""
    local = []
    all_rows = (exchange.q, exchange.kv, exchange.kv)
    for gradient, rows, parts in zip(gradients, all_rows, returned, strict=True):
        total = gradient[: rows.local]
        start = 0
        for count in rows.send_counts:
            # Server by server: its rows are distinct, so sums have a fixed order on GPUs, too.
            end = start + count
            if count:
                with scratch.borrowed():
                    part = scratch.copy(parts[start:end], total.dtype)
                    total.index_add_(0, rows.send[start:end], part)
            start = end
        local.append(total.to(parts.dtype, copy=True))
    return tuple(local)
