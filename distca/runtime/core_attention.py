"""Disaggregated core attention as one differentiable operation.

Forward: dispatch queries, keys and values to the servers; one fused kernel call per task shape;
return outputs and LSE to the owners; merge. Backward: the same road the other way. A partial
task's backward is exact because it is given the *final* output and LSE of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from distca.attention.kernel import Kernel
from distca.attention.merge import merge_partial
from distca.cost.volume import AttentionShape
from distca.runtime.exchange import Backward, Exchange, KernelCall, Rows
from distca.runtime.messages import Field, message_bytes, pack, unpack
from distca.runtime.trace import Trace
from distca.transport import Transport


@dataclass
class ExchangeSlot:
    """Where core attention finds this rank's part of the plan that holds when it runs.

    In a pipeline a micro-batch meets other micro-batches on its way back than on its way out: then
    the slot is given the backward tick's exchange before the backward pass starts.
    """

    exchange: Exchange


@dataclass(frozen=True)
class CoreAttention:
    """What core attention runs on.

    Attributes:
        transport: between the ranks that share attention servers.
        kernel: the attention kernel of this device.
        backward: "resend": the backward pass sends queries, keys and values again, and nothing is
            kept on the servers in between; "keep": servers keep what they received, which costs
            memory and saves bytes. Only possible where a micro-batch's backward pass has the plan
            of its forward pass.
        trace: records what is done.
    """

    transport: Transport
    kernel: Kernel
    backward: Backward = "resend"
    trace: Trace = field(default_factory=lambda: Trace(torch.device("cpu")))

    def __post_init__(self) -> None:
        if self.backward not in ("resend", "keep"):
            raise ValueError(f'backward is {self.backward!r}: choose "resend" or "keep"')

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        slot: ExchangeSlot,
        softmax_scale: float,
        layer: int = 0,
    ) -> torch.Tensor:
        """Core attention of the local rows, computed by the plan's servers. Collective.

        Args:
            q_THD: `[local rows, heads, head_dim]`.
            k_THD: `[local rows, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
            v_THD: like `k_THD`.
            slot: this rank's part of the plan, for this pass and for the backward pass.
            softmax_scale: scores are multiplied by it.
            layer: its number, for the trace.

        Returns:
            `[local rows, heads, head_dim]`.

        Raises:
            ValueError: the tensors do not have the rows that the plan's placement gives this rank.
        """
        exchange = slot.exchange
        for name, tensor in (("q", q_THD), ("k", k_THD), ("v", v_THD)):
            if tensor.shape[0] != exchange.q.local:
                raise ValueError(
                    f"{name} has {tensor.shape[0]} rows, but the plan places {exchange.q.local} "
                    f"tokens on rank {exchange.rank}"
                )
        return _DisaggregatedCoreAttention.apply(  # type: ignore[no-any-return,no-untyped-call]
            q_THD.contiguous(),
            k_THD.contiguous(),
            v_THD.contiguous(),
            slot,
            self,
            softmax_scale,
            layer,
        )

    def serve(
        self,
        what: Literal["forward", "backward"],
        exchange: Exchange,
        shape: AttentionShape,
        like: torch.Tensor,
        softmax_scale: float,
        layer: int = 0,
    ) -> None:
        """Computes this server's tasks of a plan that gives it no tokens. Collective.

        Args:
            what: which pass the other ranks do.
            exchange: this rank's part of the plan, without local rows.
            shape: the attention heads of this rank.
            like: a tensor of the activations' type on their device.
            softmax_scale: scores are multiplied by it.
            layer: its number, for the trace.
        """
        assert exchange.q.local == 0, "a rank with tokens of its own has their queries to send"
        q = like.new_empty((0, shape.heads, shape.head_dim))
        k = like.new_empty((0, shape.kv_heads, shape.head_dim))
        with torch.no_grad():
            if what == "forward":
                _forward(self, exchange, (q, k, k), softmax_scale, layer)
            else:
                lse = like.new_empty((0, shape.heads), dtype=torch.float32)
                _backward(self, exchange, (q, q, lse, q, k, k), softmax_scale, layer)


class _DisaggregatedCoreAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slot: ExchangeSlot,
        attention: CoreAttention,
        softmax_scale: float,
        layer: int,
    ) -> torch.Tensor:
        out, lse, served = _forward(attention, slot.exchange, (q, k, v), softmax_scale, layer)
        ctx.slot, ctx.attention = slot, attention
        ctx.softmax_scale, ctx.layer = softmax_scale, layer
        ctx.forward_exchange = slot.exchange if attention.backward == "keep" else None
        kept = served if attention.backward == "keep" else (q, k, v)
        ctx.save_for_backward(*kept, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # type: ignore[override]
        exchange = ctx.slot.exchange
        kept_for = ctx.forward_exchange
        assert kept_for is None or kept_for is exchange, "kept inputs are of another plan"
        q, k, v, out, lse = ctx.saved_tensors
        gradients = _backward(
            ctx.attention,
            exchange,
            (dout.contiguous(), out, lse, q, k, v),
            ctx.softmax_scale,
            ctx.layer,
        )
        return *gradients, None, None, None, None


def _forward(
    attention: CoreAttention,
    exchange: Exchange,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    softmax_scale: float,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Outputs and LSE of the local rows, and the served queries, keys and values."""
    transport, span = attention.transport, attention.trace.span
    q, k, v = inputs
    with span("dispatch", "exchange", layer=layer):
        q_served, k_served, v_served = _send_to_servers(
            transport, "dispatch", [(q, exchange.q), (k, exchange.kv), (v, exchange.kv)]
        )
    with span("core attention", "kernels", layer=layer):
        out_served, lse_served = _compute(
            attention.kernel, exchange, q_served, k_served, v_served, softmax_scale
        )
    with span("return", "exchange", layer=layer):
        out, lse = _return_outputs(transport, exchange, out_served, lse_served)
    return out, lse, (q_served, k_served, v_served)


def _backward(
    attention: CoreAttention,
    exchange: Exchange,
    saved: tuple[torch.Tensor, ...],
    softmax_scale: float,
    layer: int,
) -> tuple[torch.Tensor, ...]:
    """Gradients of the local queries, keys and values; `saved` is `(dout, out, lse, q, k, v)`.

    Of the last three it has the local rows, or the served ones where they were kept.
    """
    transport, span = attention.transport, attention.trace.span
    dout, out, lse, q, k, v = saved
    travelling = [(dout, exchange.q), (out, exchange.q), (lse, exchange.q)]
    if attention.backward == "resend":
        travelling += [(q, exchange.q), (k, exchange.kv), (v, exchange.kv)]
    with span("dispatch backward", "exchange", layer=layer):
        dout_served, out_served, lse_served, *inputs = _send_to_servers(
            transport, "dispatch_backward", travelling
        )
    q_served, k_served, v_served = inputs or (q, k, v)
    with span("core attention backward", "kernels", layer=layer):
        gradients = _compute_gradients(
            attention.kernel,
            exchange,
            (dout_served, q_served, k_served, v_served, out_served, lse_served),
            softmax_scale,
        )
    with span("return backward", "exchange", layer=layer):
        return _return_gradients(transport, exchange, gradients, dout.dtype)


def _send_to_servers(
    transport: Transport, phase: str, tensors: list[tuple[torch.Tensor, Rows]]
) -> list[torch.Tensor]:
    """Each tensor's served rows: its local rows `[local, ...]`, then what other ranks sent."""
    world_size = transport.world_size
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
    received = transport.all_to_all(
        phase,
        pack(outgoing, world_size),
        message_bytes([field for field, _ in outgoing], world_size),
        message_bytes([field for field, _ in incoming], world_size),
    )
    unpack(received, incoming, world_size)
    return served


def _send_to_owners(
    transport: Transport, phase: str, tensors: list[tuple[torch.Tensor, Rows]]
) -> list[torch.Tensor]:
    """The way back: rows that arrived go home. Each tensor holds served rows.

    Returns for each tensor `[sum(send_counts), ...]`: what came back for the rows that were sent.
    """
    world_size = transport.world_size
    outgoing, incoming = [], []
    for tensor, rows in tensors:
        row_shape = tuple(tensor.shape[1:])
        outgoing.append((Field(rows.receive_counts, row_shape, tensor.dtype), tensor[rows.local :]))
        incoming.append(
            (
                Field(rows.send_counts, row_shape, tensor.dtype),
                tensor.new_empty((sum(rows.send_counts), *row_shape)),
            )
        )
    received = transport.all_to_all(
        phase,
        pack(outgoing, world_size),
        message_bytes([field for field, _ in outgoing], world_size),
        message_bytes([field for field, _ in incoming], world_size),
    )
    unpack(received, incoming, world_size)
    return [rows for _, rows in incoming]


def _take(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _kernel_options(call: KernelCall, exchange: Exchange, scale: float) -> dict[str, Any]:
    return {
        "causal": call.causal,
        "window_left": exchange.mask.window_left if call.causal else None,
        "softmax_scale": scale,
    }


def _compute(
    kernel: Kernel,
    exchange: Exchange,
    q_served: torch.Tensor,
    k_served: torch.Tensor,
    v_served: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and LSE of the served query rows; those of rows without a task are undefined."""
    out = lse = None
    for call in exchange.calls:
        part_out, part_lse = kernel.forward(
            _take(q_served, call.q_rows),
            _take(k_served, call.kv_rows),
            _take(v_served, call.kv_rows),
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            **_kernel_options(call, exchange, softmax_scale),
        )
        if len(exchange.calls) == 1 and call.q_rows is None and call.first_q is None:
            return part_out, part_lse
        if out is None or lse is None:
            out = torch.empty_like(q_served)
            lse = part_lse.new_empty(q_served.shape[:2])
        rows = _rows_of(call, q_served)
        first = rows if call.first_q is None else rows.index_select(0, call.first_q)
        out.index_copy_(0, first, _take(part_out, call.first_q))
        lse.index_copy_(0, first, _take(part_lse, call.first_q))
        for part in call.repeated_q:
            merge_partial(out, lse, rows.index_select(0, part), part_out[part], part_lse[part])
    if out is None or lse is None:
        return torch.empty_like(q_served), q_served.new_empty(
            q_served.shape[:2], dtype=torch.float32
        )
    return out, lse


def _rows_of(call: KernelCall, q_served: torch.Tensor) -> torch.Tensor:
    if call.q_rows is not None:
        return call.q_rows
    return torch.arange(q_served.shape[0], device=q_served.device)


def _return_outputs(
    transport: Transport, exchange: Exchange, out_served: torch.Tensor, lse_served: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The final output and LSE of the local rows, partial ones merged."""
    back_out, back_lse = _send_to_owners(
        transport, "return", [(out_served, exchange.q), (lse_served, exchange.q)]
    )
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


def _compute_gradients(
    kernel: Kernel,
    exchange: Exchange,
    served: tuple[torch.Tensor, ...],
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the served rows, float32: `(dq, dk, dv)`."""
    dout, q, k, v, out, lse = served
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dv = torch.zeros_like(dk)
    for call in exchange.calls:
        parts = kernel.backward(
            _take(dout, call.q_rows),
            _take(q, call.q_rows),
            _take(k, call.kv_rows),
            _take(v, call.kv_rows),
            _take(out, call.q_rows),
            _take(lse, call.q_rows),
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            **_kernel_options(call, exchange, softmax_scale),
        )
        for total, part, rows in zip(
            (dq, dk, dv), parts, (call.q_rows, call.kv_rows, call.kv_rows), strict=True
        ):
            if rows is None:
                total += part
            else:
                total.index_add_(0, rows, part.float())
    return dq, dk, dv


def _return_gradients(
    transport: Transport,
    exchange: Exchange,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The gradients of the local rows: this server's own and what the others return."""
    all_rows = (exchange.q, exchange.kv, exchange.kv)
    # A cast copies only the rows that travel; local sums stay in float32 until the end.
    outgoing = []
    for gradient, rows in zip(gradients, all_rows, strict=True):
        travelling = gradient[rows.local :].to(dtype)
        outgoing.append((travelling, Rows(0, rows.send, rows.send_counts, rows.receive_counts)))
    back = _send_to_owners(transport, "return_backward", outgoing)
    local = []
    for gradient, rows, parts in zip(gradients, all_rows, back, strict=True):
        total = gradient[: rows.local]
        start = 0
        for count in rows.send_counts:
            # One server's rows are distinct, so the order of the sums is fixed on GPUs, too.
            end = start + count
            if count:
                total.index_add_(0, rows.send[start:end], parts[start:end].float())
            start = end
        local.append(total.to(dtype))
    return tuple(local)
