"""Differentiable attention over packed documents on one rank, without disaggregation."""

from __future__ import annotations

from typing import Any

import torch

from distca.attention.kernel import Kernel, KernelTasks


def packed_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kernel: Kernel,
    *,
    window_left: int | None,
    softmax_scale: float,
) -> torch.Tensor:
    """Causal attention of every packed document over itself.

    Args:
        q_THD: `[tokens, heads, head_dim]`.
        k_THD: `[tokens, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        v_THD: like `k_THD`.
        cu_seqlens: first row of each document, and the total: int32 `[documents + 1]` on the CPU.
        kernel: the attention kernel of this device.
        window_left: earlier tokens that a query sees; None: all.
        softmax_scale: factor of the scores.

    Returns:
        The output, `[tokens, heads, head_dim]`.
    """
    return _PackedAttention.apply(  # type: ignore[no-any-return,no-untyped-call]
        q_THD, k_THD, v_THD, cu_seqlens, kernel, window_left, softmax_scale
    )


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        kernel: Kernel,
        window_left: int | None,
        softmax_scale: float,
    ) -> torch.Tensor:
        tasks = KernelTasks(cu_seqlens, cu_seqlens, True, window_left, softmax_scale)
        ctx.kernel, ctx.tasks = kernel, tasks
        out, lse = kernel.forward(q, k, v, tasks)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # type: ignore[override]
        gradients = ctx.kernel.backward(dout, *ctx.saved_tensors, ctx.tasks)
        return *gradients, None, None, None, None
