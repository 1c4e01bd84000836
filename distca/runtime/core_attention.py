"""Disaggregated core attention as one differentiable operation.

Forward: dispatch queries, keys and values to the servers; one fused kernel call per task shape;
return outputs and LSE to the owners; merge. Backward: dispatch the output's gradient; one kernel
call per task shape; return the inputs' gradients to the owners; add. A partial task's backward is
exact because it is given the *final* output and LSE of its rows.

One step starts an exchange and the next waits for it (`AttentionCall`); other work overlaps. To
autograd a call is three functions, one for each of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.autograd.function import FunctionCtx

from distca.attention.kernel import Kernel
from distca.cost.memory import CoreAttentionMemory
from distca.cost.volume import BACKWARD_INPUTS, BackwardInputs
from distca.runtime.attention_call import AttentionCall, CallResources
from distca.runtime.attention_times import AttentionTimes
from distca.runtime.buffers import Buffers
from distca.runtime.event_cursor import EventCursor
from distca.runtime.latent_rows import SentLatents
from distca.runtime.trace import Trace
from distca.schedule.program import Event
from distca.transport import Transport


@dataclass(frozen=True)
class CoreAttention:
    """Disaggregated core attention of one rank, with the resources that it runs on.

    Attributes:
        transport: transport between the ranks that share attention servers.
        kernel: attention kernel of this device.
        buffers: memory that calls run in. Reserve room for a plan before it is run.
        backward: "resend": the backward pass sends queries, keys and values again, and servers keep
            nothing in between; "keep": servers keep what they received, for more memory and fewer
            bytes. "keep" needs the same plan in a micro-batch's forward and backward pass.
        trace: timeline of what is done.
        times: times of waits, and of kernels if these are a `TimedKernel`'s.

    Raises:
        ValueError: `backward` is neither "resend" nor "keep".
    """

    transport: Transport
    kernel: Kernel
    buffers: Buffers
    backward: BackwardInputs = "resend"
    trace: Trace = field(default_factory=lambda: Trace(torch.device("cpu")))
    times: AttentionTimes = field(default_factory=lambda: AttentionTimes(torch.device("cpu")))

    def __post_init__(self) -> None:
        if self.backward not in BACKWARD_INPUTS:
            raise ValueError(f'backward is {self.backward!r}: choose "resend" or "keep"')

    def reserve(self, needed: CoreAttentionMemory) -> None:
        """Grows the buffers to what plans need; no call may be under way. Collective.

        Args:
            needed: sizes, the same on every rank; see `distca.cost.memory.plan_memory`.
        """
        self.buffers.reserve(needed, self.transport)

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        cursor: EventCursor,
        softmax_scale: float,
        labels: Mapping[str, object] | None = None,
        nano_batch: int = 0,
        sink_H: torch.Tensor | None = None,
        latents: SentLatents | None = None,
    ) -> torch.Tensor:
        """Core attention of the local rows, computed by the plan's servers. Collective.

        Args:
            q_THD: `[local rows, heads, head_dim]`.
            k_THD: `[local key rows, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
            v_THD: `[local key rows, kv_heads, v_head_dim]`.
            cursor: this rank's part of the plan and the order of events, for this pass and for the
                backward pass. Other nano-batches go on while inputs and outputs are under way. In
                the backward pass that needs no code: autograd reverses the order of the forward.
            softmax_scale: factor of the scores.
            labels: labels for the trace, such as the layer.
            nano_batch: number of the nano-batch whose rows these are.
            sink_H: one more logit of each head, which has no value, `[heads]`, or None.
            latents: latents of `k_THD` and `v_THD`, which travel in their place and give gradients
                of their own, and of the weight; None: keys and values travel. The exchanges must
                be built for what travels.

        Returns:
            The output, `[local rows, heads, v_head_dim]`.

        Raises:
            ValueError: the tensors do not have the rows that the plan's placement gives this rank.
        """
        # Of the first mask: own rows are the same with each.
        exchange = cursor.exchanges[nano_batch]
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
        event = cursor.take_turn("forward", "dispatch", nano_batch)
        call = self._call(cursor, nano_batch, softmax_scale, labels or {}, event.layer)
        return _differentiable(call, q_THD, k_THD, v_THD, event, sink_H, latents)

    def serving_call(
        self,
        cursor: EventCursor,
        nano_batch: int,
        softmax_scale: float,
        labels: Mapping[str, object],
        layer: int,
    ) -> AttentionCall:
        """Makes the call of a rank without tokens, which only serves. See `AttentionCall`."""
        local = cursor.exchange(nano_batch, layer).q.local
        assert local == 0, "a rank with tokens has their queries to send"
        return self._call(cursor, nano_batch, softmax_scale, labels, layer)

    def _call(
        self,
        cursor: EventCursor,
        nano_batch: int,
        softmax_scale: float,
        labels: Mapping[str, object],
        layer: int = 0,
    ) -> AttentionCall:
        resources = CallResources(
            self.transport,
            self.kernel,
            self.trace,
            self.times,
            self.buffers.workspaces[nano_batch],
            self.buffers.scratch,
            self.buffers.rows,
            keeps_inputs=self.backward == "keep",
        )
        return AttentionCall(resources, cursor, nano_batch, layer, softmax_scale, labels)


def _differentiable(
    call: AttentionCall,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    event: Event,
    sink_H: torch.Tensor | None = None,
    latents: SentLatents | None = None,
) -> torch.Tensor:
    """Does a call's forward steps, each in its turn; autograd does the backward steps.

    Args:
        call: call of the nano-batch.
        q_THD: local queries, `[local rows, heads, head_dim]`.
        k_THD: local keys, `[local key rows, kv_heads, head_dim]`.
        v_THD: local values, `[local key rows, kv_heads, v_head_dim]`; so wide are outputs' heads.
        event: event whose turn has come: the call's dispatch.
        sink_H: one more logit of each head, `[heads]`, or None.
        latents: latents that travel instead of keys and values, or None.
    """
    latent = weight = None
    if latents is not None:
        latent, weight = latents.latent.contiguous(), latents.weight
        # Its gradient is that of `_Compute`.
        latents = replace(latents, weight=None if weight is None else weight.detach())
    ticket = _Dispatch.apply(  # type: ignore[no-untyped-call]
        q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous(), latent, latents, call
    )
    if ticket.requires_grad:
        call.cursor.register_backward(event, call)
    call.cursor.take_turn("forward", "compute", call.nano_batch)
    ticket = _Compute.apply(ticket, weight, call)  # type: ignore[no-untyped-call]
    call.cursor.take_turn("forward", "combine", call.nano_batch)
    return _Combine.apply(ticket, sink_H, call)  # type: ignore[no-any-return,no-untyped-call]


_Gradients = tuple[torch.Tensor | None, ...]
"""Gradients of a function's inputs; None: it has none."""


class _Context(FunctionCtx):
    """What the three keep from the forward to the backward pass."""

    call: AttentionCall


class _Dispatch(torch.autograd.Function):
    """The first of three autograd functions, which share their state in the `AttentionCall`.

    Empty tensors, the tickets, lead from one to the next and so tell autograd the order.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Context,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        latent: torch.Tensor | None,
        latents: SentLatents | None,
        call: AttentionCall,
    ) -> torch.Tensor:
        ctx.call = call
        if latents is not None and latent is not None:
            latents = replace(latents, latent=latent.detach())
        call.dispatch(q.detach(), k.detach(), v.detach(), latents)
        return q.new_empty(0)

    @staticmethod
    def backward(ctx: _Context, _: torch.Tensor) -> _Gradients:  # type: ignore[override]
        call = ctx.call
        event = call.cursor.take_turn("backward", "combine", call.nano_batch)
        call.cursor.unregister_backward(event)
        dq, dk, dv, *of_latent = call.combine_backward()
        return dq, dk, dv, of_latent[0] if of_latent else None, None, None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Context, ticket: torch.Tensor, weight: torch.Tensor | None, call: AttentionCall
    ) -> torch.Tensor:
        ctx.call = call
        call.compute()
        return ticket.new_empty(0)

    @staticmethod
    def backward(ctx: _Context, ticket: torch.Tensor) -> _Gradients:  # type: ignore[override]
        call = ctx.call
        call.cursor.take_turn("backward", "compute", call.nano_batch)
        of_weight = call.compute_backward()
        # This layer's keys and values have come, which frees the channel for the layer below's.
        call.cursor.prefetch()
        return ticket, of_weight, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Context, ticket: torch.Tensor, sink: torch.Tensor | None, call: AttentionCall
    ) -> torch.Tensor:
        ctx.call = call
        return call.combine(None if sink is None else sink.detach())

    @staticmethod
    def backward(ctx: _Context, dout: torch.Tensor) -> _Gradients:  # type: ignore[override]
        call = ctx.call
        call.cursor.take_turn("backward", "dispatch", call.nano_batch)
        sink = call.dispatch_backward(dout.contiguous())
        return dout.new_empty(0), sink, None
