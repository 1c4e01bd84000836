"""Differentiable attention over packed documents on one rank, without disaggregation."""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx

from distca.attention.kernel import Kernel, KernelTasks
from distca.attention.sink import sink_gradient, with_sink


def packed_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kernel: Kernel,
    *,
    window_left: int | None,
    softmax_scale: float,
    sink_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every packed document over itself.

    Args:
        q_THD: `[tokens, heads, head_dim]`.
        k_THD: `[tokens, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        v_THD: `[tokens, kv_heads, v_head_dim]`.
        cu_seqlens: first row of each document, and the total: int32 `[documents + 1]` on the CPU.
        kernel: the attention kernel of this device.
        window_left: earlier tokens that a query sees; None: all.
        softmax_scale: factor of the scores.
        sink_H: one more logit of each head, which has no value, `[heads]`, or None.

    Returns:
        The output, `[tokens, heads, v_head_dim]`.
    """
    return _PackedAttention.apply(  # type: ignore[no-any-return,no-untyped-call]
        q_THD, k_THD, v_THD, sink_H, cu_seqlens, kernel, window_left, softmax_scale
    )


class _Context(FunctionCtx):
    """What is kept from the forward to the backward pass."""

    kernel: Kernel
    tasks: KernelTasks
    saved_tensors: tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None
    ]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Context,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
        kernel: Kernel,
        window_left: int | None,
        softmax_scale: float,
    ) -> torch.Tensor:
        tasks = KernelTasks(cu_seqlens, cu_seqlens, True, window_left, softmax_scale)
        ctx.kernel, ctx.tasks = kernel, tasks
        out, lse = kernel.forward(q, k, v, tasks)
        if sink is not None:
            out, lse = with_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, out, lse, sink)  # type: ignore[arg-type]
        return out

    @staticmethod
    def backward(ctx: _Context, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, sink = ctx.saved_tensors
        gradients = ctx.kernel.backward(dout, q, k, v, out, lse, ctx.tasks)
        of_sink = None if sink is None else sink_gradient(dout, out, lse, sink)
        return *gradients, of_sink, None, None, None, None
