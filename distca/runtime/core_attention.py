"""Disaggregated core attention as one differentiable operation.

Forward: dispatch queries, keys and values to the servers; one fused kernel call per task shape;
return outputs and LSE to the owners; merge. Backward: the same road the other way. A partial
task's backward is exact because it is given the *final* output and LSE of its rows.

Exchanges are started by one step and waited for by the next (`Call`), so that other work can be
done in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distca.attention.kernel import Kernel
from distca.attention.merge import merge_partial
from distca.runtime.exchange import Backward, Exchange, KernelCall, Rows
from distca.runtime.messages import Field, message_bytes, pack, unpack
from distca.runtime.trace import Trace
from distca.transport import Pending, Transport


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
        labels: Mapping[str, Any] | None = None,
        pause: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Core attention of the local rows, computed by the plan's servers. Collective.

        Args:
            q_THD: `[local rows, heads, head_dim]`.
            k_THD: `[local key rows, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
            v_THD: like `k_THD`.
            slot: this rank's part of the plan, for this pass and for the backward pass.
            softmax_scale: scores are multiplied by it.
            labels: such as the layer, for the trace.
            pause: called while the inputs and then while the outputs are under way: other work can
                be done there. The backward pass pauses at the same places by itself, as autograd
                goes back through what was done in the opposite order.

        Returns:
            `[local rows, heads, head_dim]`.

        Raises:
            ValueError: the tensors do not have the rows that the plan's placement gives this rank.
        """
        exchange = slot.exchange
        for name, tensor, rows in (
            ("q", q_THD, exchange.q),
            ("k", k_THD, exchange.kv),
            ("v", v_THD, exchange.kv),
        ):
            if tensor.shape[0] != rows.local:
                raise ValueError(
                    f"{name} has {tensor.shape[0]} rows, but the plan places {rows.local} "
                    f"tokens on rank {exchange.rank}"
                )
        call = Call(self, slot, softmax_scale, labels or {})
        ticket = _Start.apply(  # type: ignore[no-untyped-call]
            q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous(), call
        )
        if pause is not None:
            pause()
        ticket = _Compute.apply(ticket, call)  # type: ignore[no-untyped-call]
        if pause is not None:
            pause()
        return _Finish.apply(ticket, call)  # type: ignore[no-any-return,no-untyped-call]

    def serving_call(
        self, exchange: Exchange, softmax_scale: float, labels: Mapping[str, Any]
    ) -> Call:
        """A call of a rank to which the plan gives no tokens: it only serves. See `Call`."""
        assert exchange.q.local == 0, "a rank with tokens of its own has their queries to send"
        return Call(self, ExchangeSlot(exchange), softmax_scale, labels)


class Call:
    """One call of core attention, as the steps that other work can be done between.

    Every rank does the same steps in the same order: `start`, `compute`, `finish`; and for the
    gradients `start_backward`, `compute_backward`, `finish_backward`. A step that starts an
    exchange does not wait for it, the next one does.

    Args:
        attention: what it runs on.
        slot: this rank's part of the plan.
        softmax_scale: scores are multiplied by it.
        labels: for the trace.
    """

    def __init__(
        self,
        attention: CoreAttention,
        slot: ExchangeSlot,
        softmax_scale: float,
        labels: Mapping[str, Any],
    ) -> None:
        self._attention, self._slot = attention, slot
        self._scale, self._labels = softmax_scale, labels
        self._exchange = slot.exchange
        # What the next step needs.
        self._sent: _Sent | None = None
        self._local: tuple[torch.Tensor, ...] = ()
        # What the backward pass needs: queries, keys, values; output and LSE.
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._outputs: tuple[torch.Tensor, ...] = ()

    def _span(self, name: str, lane: str) -> Any:
        return self._attention.trace.span(name, lane, **self._labels)

    @property
    def _keeps(self) -> bool:
        return self._attention.backward == "keep"

    def start(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sends the local rows to their servers."""
        exchange = self._exchange = self._slot.exchange
        with self._span("dispatch", "exchange"):
            self._sent = _send_to_servers(
                self._attention.transport,
                "dispatch",
                [(q, exchange.q), (k, exchange.kv), (v, exchange.kv)],
            )
        if not self._keeps:
            self._inputs = (q, k, v)

    def compute(self) -> None:
        """Runs the kernels, and sends outputs to their owners."""
        assert self._sent is not None
        exchange, transport = self._exchange, self._attention.transport
        with self._span("wait for dispatch", "exchange"):
            q, k, v = self._sent.wait()
        if self._keeps:
            self._inputs = (q, k, v)
        with self._span("core attention", "kernels"):
            self._local = _compute(self._attention.kernel, exchange, q, k, v, self._scale)
        with self._span("return", "exchange"):
            self._sent = _send_to_owners(
                transport, "return", [(rows, exchange.q) for rows in self._local]
            )

    def finish(self) -> torch.Tensor:
        """The final output of the local rows."""
        assert self._sent is not None
        with self._span("wait for return", "exchange"):
            out_served, lse_served = self._local
            out, lse = _merge_returned(self._exchange, out_served, lse_served, *self._sent.wait())
        self._sent, self._local = None, ()
        # Without its history, the output does not keep itself alive.
        self._outputs = (out.detach(), lse)
        return out

    def start_backward(self, dout: torch.Tensor) -> None:
        """Sends the output's gradient, and what the kernels need again, to the servers."""
        exchange = self._slot.exchange
        assert exchange is self._exchange or not self._keeps, "kept inputs are of another plan"
        self._exchange = exchange
        travelling = [(rows, exchange.q) for rows in (dout, *self._outputs)]
        if not self._keeps:
            q, k, v = self._inputs
            travelling += [(q, exchange.q), (k, exchange.kv), (v, exchange.kv)]
        with self._span("dispatch backward", "exchange"):
            self._sent = _send_to_servers(
                self._attention.transport, "dispatch_backward", travelling
            )
        self._outputs = ()
        if not self._keeps:
            self._inputs = ()

    def start_backward_without_tokens(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """The same on a rank that only serves; `q` and `k` have no rows."""
        self._inputs = (q, k, k)
        self._outputs = (q, q.new_empty(q.shape[:2], dtype=torch.float32))
        self.start_backward(q)

    def compute_backward(self) -> None:
        """Runs the kernels, and sends gradients to their owners."""
        assert self._sent is not None
        exchange = self._exchange
        with self._span("wait for dispatch backward", "exchange"):
            dout, out, lse, *inputs = self._sent.wait()
        q, k, v = inputs or self._inputs
        with self._span("core attention backward", "kernels"):
            self._local = _compute_gradients(
                self._attention.kernel, exchange, (dout, q, k, v, out, lse), self._scale
            )
        self._inputs = ()
        with self._span("return backward", "exchange"):
            self._sent = _send_to_owners(
                self._attention.transport,
                "return_backward",
                list(zip(self._local, (exchange.q, exchange.kv, exchange.kv), strict=True)),
                dout.dtype,
            )

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """The gradients of the local queries, keys and values."""
        assert self._sent is not None
        with self._span("wait for return backward", "exchange"):
            gradients = _add_returned(self._exchange, self._local, self._sent.wait())
        self._sent, self._local = None, ()
        return gradients


class _Start(torch.autograd.Function):
    """The first of three nodes; what they hand on to each other is in the `Call`.

    The tickets between them are empty tensors, by which autograd knows the order.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        ctx.call = call
        call.start(q.detach(), k.detach(), v.detach())
        return q.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        return *ctx.call.finish_backward(), None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, call: Call) -> torch.Tensor:  # type: ignore[override]
        ctx.call = call
        call.compute()
        return ticket.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.call.compute_backward()
        return ticket, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, call: Call) -> torch.Tensor:  # type: ignore[override]
        ctx.call = call
        return call.finish()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.call.start_backward(dout.contiguous())
        return dout.new_empty(0), None


@dataclass(frozen=True)
class _Sent:
    """Rows under way, and where those that arrive go."""

    pending: Pending
    incoming: list[tuple[Field, torch.Tensor]]
    result: list[torch.Tensor]
    world_size: int

    def wait(self) -> list[torch.Tensor]:
        unpack(self.pending.wait(), self.incoming, self.world_size)
        return self.result


def _send(
    transport: Transport,
    phase: str,
    outgoing: list[tuple[Field, torch.Tensor]],
    incoming: list[tuple[Field, torch.Tensor]],
    result: list[torch.Tensor],
) -> _Sent:
    world_size = transport.world_size
    pending = transport.start(
        phase,
        pack(outgoing, world_size),
        message_bytes([field for field, _ in outgoing], world_size),
        message_bytes([field for field, _ in incoming], world_size),
    )
    return _Sent(pending, incoming, result, world_size)


def _send_to_servers(
    transport: Transport, phase: str, tensors: list[tuple[torch.Tensor, Rows]]
) -> _Sent:
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


def _send_to_owners(
    transport: Transport,
    phase: str,
    tensors: Sequence[tuple[torch.Tensor, Rows]],
    dtype: torch.dtype | None = None,
) -> _Sent:
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


def _merge_returned(
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


def _add_returned(
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
