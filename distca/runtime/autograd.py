"""Core attention's call in autograd: three functions, one for each step of `AttentionCall`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from distca.runtime.attention_call import AttentionCall
from distca.runtime.latent_rows import SentLatents
from distca.schedule.program import Event


def differentiable_call(
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
        sink_H: one more logit of each head, `[heads]`; None: there is none.
        latents: latents that travel instead of keys and values; None: none do.
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
        call.run.register_backward(event, call)
    call.run.take_turn("forward", "compute", call.nano_batch)
    ticket = _Compute.apply(ticket, weight, call)  # type: ignore[no-untyped-call]
    call.run.take_turn("forward", "combine", call.nano_batch)
    return _Combine.apply(ticket, sink_H, call)  # type: ignore[no-any-return,no-untyped-call]


class _Dispatch(torch.autograd.Function):
    """The first of three autograd functions, which share their state in the `AttentionCall`.

    Empty tensors, the tickets, lead from one to the next and so tell autograd the order.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
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
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        call: AttentionCall = ctx.call
        call.run.unregister_backward(call.run.take_turn("backward", "combine", call.nano_batch))
        dq, dk, dv, *of_latent = call.combine_backward()
        return dq, dk, dv, of_latent[0] if of_latent else None, None, None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, ticket: torch.Tensor, weight: torch.Tensor | None, call: AttentionCall
    ) -> torch.Tensor:
        ctx.call = call
        call.compute()
        return ticket.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: torch.Tensor) -> Any:  # type: ignore[override]
        call: AttentionCall = ctx.call
        call.run.take_turn("backward", "compute", call.nano_batch)
        of_weight = call.compute_backward()
        # This layer's keys and values have come, which frees the channel for the layer below's.
        call.run.prefetch()
        return ticket, of_weight, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, ticket: torch.Tensor, sink: torch.Tensor | None, call: AttentionCall
    ) -> torch.Tensor:
        ctx.call = call
        return call.combine(None if sink is None else sink.detach())

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # type: ignore[override]
        call: AttentionCall = ctx.call
        call.run.take_turn("backward", "dispatch", call.nano_batch)
        sink = call.dispatch_backward(dout.contiguous())
        return dout.new_empty(0), sink, None
