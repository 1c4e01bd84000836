"""Rows on their way to the servers and back to their owners, started and waited for apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.attention.merge import merge_partial
from distca.runtime.exchange import Exchange, Rows
from distca.runtime.messages import Field, message_bytes, pack, unpack
from distca.transport import Pending, Transport


@dataclass(frozen=True)
class RowsUnderWay:
    """Rows of several tensors that were sent, and where those that arrive go."""

    pending: Pending
    incoming: list[tuple[Field, torch.Tensor]]
    result: list[torch.Tensor]
    world_size: int

    def wait(self) -> list[torch.Tensor]:
        """The tensors that the sender of these rows was promised, complete."""
        unpack(self.pending.wait(), self.incoming, self.world_size)
        return self.result


def _send(
    transport: Transport,
    phase: str,
    outgoing: list[tuple[Field, torch.Tensor]],
    incoming: list[tuple[Field, torch.Tensor]],
    result: list[torch.Tensor],
) -> RowsUnderWay:
    world_size = transport.world_size
    pending = transport.start(
        phase,
        pack(outgoing, world_size),
        message_bytes([field for field, _ in outgoing], world_size),
        message_bytes([field for field, _ in incoming], world_size),
    )
    return RowsUnderWay(pending, incoming, result, world_size)


def send_to_servers(
    transport: Transport, phase: str, tensors: list[tuple[torch.Tensor, Rows]]
) -> RowsUnderWay:
    """Each tensor's served rows: its local rows `[local, ...]`, then what other ranks sent."""
    outgoing, incoming, served = [], [], []
    for tensor, rows in tensors:
        row_shape = tuple(tensor.shape[1:])
        outgoing.append(
            (Field(rows.send_counts, row_shape, tensor.dtype), tensor.index_select(0, rows.send))
        )
        everything = tensor
        if rows.received:
            everything = tensor.new_empty((rows.served, *row_shape))
            everything[: rows.local] = tensor
        incoming.append(
            (Field(rows.receive_counts, row_shape, tensor.dtype), everything[rows.local :])
        )
        served.append(everything)
    return _send(transport, phase, outgoing, incoming, served)


def send_to_owners(
    transport: Transport,
    phase: str,
    tensors: Sequence[tuple[torch.Tensor, Rows]],
    dtype: torch.dtype | None = None,
) -> RowsUnderWay:
    """The way back: rows that arrived go home. Each tensor holds served rows.

    With a `dtype` they travel as that; only the rows that travel are copied. What comes back for
    each tensor is `[sum(send_counts), ...]`.
    """
    outgoing, incoming = [], []
    for tensor, rows in tensors:
        travelling = tensor[rows.local :]
        if dtype is not None:
            travelling = travelling.to(dtype)
        row_shape = tuple(tensor.shape[1:])
        outgoing.append((Field(rows.receive_counts, row_shape, travelling.dtype), travelling))
        incoming.append(
            (
                Field(rows.send_counts, row_shape, travelling.dtype),
                travelling.new_empty((sum(rows.send_counts), *row_shape)),
            )
        )
    return _send(transport, phase, outgoing, incoming, [rows for _, rows in incoming])


def merge_returned(
    exchange: Exchange,
    out_served: torch.Tensor,
    lse_served: torch.Tensor,
    back_out: torch.Tensor,
    back_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The final output and LSE of the local rows, partial ones merged."""
    # The received rows' part is dropped, so that the saved outputs do not keep it alive.
    local = exchange.q.local
    out = out_served[:local].clone() if exchange.q.received else out_served
    lse = lse_served[:local].clone() if exchange.q.received else lse_served
    start = 0
    for arrival in exchange.arrivals:
        end = start + exchange.q.send_counts[arrival.server]
        rows = exchange.q.send[start:end]
        part_out, part_lse = back_out[start:end], back_lse[start:end]
        first = rows.index_select(0, arrival.first)
        out.index_copy_(0, first, part_out.index_select(0, arrival.first))
        lse.index_copy_(0, first, part_lse.index_select(0, arrival.first))
        if len(arrival.repeated):
            merge_partial(
                out,
                lse,
                rows.index_select(0, arrival.repeated),
                part_out.index_select(0, arrival.repeated),
                part_lse.index_select(0, arrival.repeated),
            )
        start = end
    return out, lse


def add_returned(
    exchange: Exchange, gradients: Sequence[torch.Tensor], back: Sequence[torch.Tensor]
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
                total.index_add_(0, rows.send[start:end], parts[start:end].float())
            start = end
        local.append(total.to(parts.dtype))
    return tuple(local)
