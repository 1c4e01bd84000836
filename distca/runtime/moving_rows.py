"""Rows on their way to the servers and back to their owners; start and wait are separate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.attention.merge import add_parts
from distca.runtime.exchange import Exchange, Rows
from distca.runtime.messages import ByKind, MessageLayout, pack, unpack
from distca.runtime.server_kernels import combine
from distca.runtime.workspace import Workspace
from distca.transport import Channel, Pending, Transport


@dataclass(frozen=True)
class RowsUnderWay:
    """Rows of several tensors in an exchange, with memory for those that arrive.

    Attributes:
        pending: the exchange; None: no rank sends any row.
        layout: layout of the messages; None, too, if no rank sends any row.
        targets: tensors for the rows that arrive.
        result: whole tensors, of which `targets` are parts.
    """

    pending: Pending | None
    layout: MessageLayout | None
    targets: Sequence[torch.Tensor]
    result: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """Waits for the exchange, and returns the completed tensors."""
        if self.pending is not None and self.layout is not None:
            unpack(self.pending.wait(), self.layout, self.targets)
            self.pending.release()
        return self.result


@dataclass(frozen=True)
class RowsForServers:
    """Rows of several tensors in an exchange to the servers, without memory for arrivals yet.

    Memory is taken later where rows are sent ahead, while an earlier call's rows are still needed.
    """

    pending: Pending | None
    layout: MessageLayout | None
    exchange: Exchange
    tensors: ByKind

    def put_together(self, workspace: Workspace | None) -> RowsUnderWay:
        """Takes memory for each tensor's served rows, and copies the local rows there.

        Args:
            workspace: memory for the served rows; None: new tensors, which can be kept.
        """
        exchange = self.exchange
        served, targets = [], []
        for tensors, rows in zip(self.tensors, (exchange.q, exchange.kv), strict=True):
            for tensor in tensors:
                served.append(_served(tensor, rows, workspace))
                targets.append(served[-1][rows.local :])
        return RowsUnderWay(self.pending, self.layout, targets, served)


def _served(tensor: torch.Tensor, rows: Rows, workspace: Workspace | None) -> torch.Tensor:
    """Memory for served rows, with the local ones in place."""
    if not rows.received and tensor.is_contiguous():
        return tensor
    if workspace is None:
        served = tensor.new_empty((rows.served, *tensor.shape[1:]))
    else:
        served = workspace.rows(tensor, rows.served)
    served[: rows.local] = tensor
    return served


def _start_exchange(
    transport: Transport,
    phase: str,
    channel: Channel,
    layout: MessageLayout,
    tensors: Sequence[torch.Tensor],
) -> Pending:
    """Starts to send rows, sorted by destination."""
    pack(transport.staging(channel, layout.sizes.sent), layout, tensors)
    return transport.start(phase, channel, layout.sizes)


def _any_moves(exchange: Exchange, tensors: ByKind) -> bool:
    """Whether any rank sends any row. On a GPU's stream even an empty exchange would wait for
    those before it."""
    return bool((tensors.q and exchange.q.move) or (tensors.kv and exchange.kv.move))


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
    pending = layout = None
    if _any_moves(exchange, tensors):
        channel = Channel("to servers", slot)
        layout = exchange.layout(channel.direction, tensors.row_types)
        with scratch.borrowed():
            sent = [scratch.gather(tensor, exchange.q.send) for tensor in tensors.q]
            sent += [scratch.gather(tensor, exchange.kv.send) for tensor in tensors.kv]
            pending = _start_exchange(transport, phase, channel, layout, sent)
    return RowsForServers(pending, layout, exchange, tensors)


def send_to_owners(
    transport: Transport,
    phase: str,
    slot: int,
    exchange: Exchange,
    tensors: ByKind,
    targets: ByKind,
    scratch: Workspace,
) -> RowsUnderWay:
    """Starts to send the results of received rows back to the rows' owners.

    Args:
        transport: transport of the rows.
        phase: phase of the exchange, under which bytes are counted.
        slot: slot of the channel.
        exchange: this rank's part of the plan.
        tensors: results of served rows, `[served, ...]`.
        targets: memory for what comes back, `[sent, ...]`; rows travel in its dtypes. It may be
            where received rows' results are.
        scratch: memory for rows on their way out.
    """
    pending = layout = None
    into = [*targets.q, *targets.kv]
    if _any_moves(exchange, targets):
        channel = Channel("to owners", slot)
        layout = exchange.layout(channel.direction, targets.row_types)
        results = [each[exchange.q.local : exchange.q.served] for each in tensors.q]
        results += [each[exchange.kv.local : exchange.kv.served] for each in tensors.kv]
        with scratch.borrowed():
            travelling = [
                _as(result, target.dtype, scratch)
                for result, target in zip(results, into, strict=True)
            ]
            pending = _start_exchange(transport, phase, channel, layout, travelling)
    return RowsUnderWay(pending, layout, into, into)


def _as(tensor: torch.Tensor, dtype: torch.dtype, scratch: Workspace) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else scratch.copy(tensor, dtype)


def returned_rows(exchange: Exchange, outputs: Sequence[torch.Tensor]) -> ByKind:
    """The memory for outputs that come back: after the local rows of this server's outputs."""
    q = exchange.q
    return ByKind([each[q.local : q.local + q.sent] for each in outputs])


def merge_returned(
    exchange: Exchange,
    outputs: tuple[torch.Tensor, torch.Tensor],
    workspace: Workspace,
    scratch: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The final output and LSE of the local rows, partial ones merged.

    Args:
        exchange: this rank's part of the plan.
        outputs: output and LSE of the local rows as computed here, then those that came back, then
            room for merged rows.
        workspace: memory in which `outputs` may lie; the result does not.
        scratch: memory for temporaries.
    """
    out, lse = outputs
    local = exchange.q.local
    if exchange.finished is not None:
        final = out.new_empty((local, *out.shape[1:])), lse.new_empty((local, *lse.shape[1:]))
        combine(exchange.finished, outputs, final, scratch)
        return final
    if exchange.q.received or workspace.owns(out):
        # Cloned, so that the saved outputs do not keep the received rows' part alive.
        return out[:local].clone(), lse[:local].clone()
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
        if rows.sent:
            with scratch.borrowed():
                add_parts(total, _as(parts, total.dtype, scratch), rows.sums)
        local.append(total.to(parts.dtype, copy=True))
    return tuple(local)
