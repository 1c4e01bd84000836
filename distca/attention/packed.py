"""Differentiable attention over packed documents on one rank, where nothing is disaggregated."""

from __future__ import annotations

from typing import Any

import torch

from distca.attention.kernel import Kernel


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
        cu_seqlens: int32 `[documents + 1]` on the CPU, where each document starts.
        kernel: the attention kernel of this device.
        window_left: earlier tokens that a query sees; None for all.
        softmax_scale: scores are multiplied by it.

    Returns:
        `[tokens, heads, head_dim]`.
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
        ctx.kernel, ctx.cu_seqlens = kernel, cu_seqlens
        ctx.options = {
            "causal": True,
            "window_left": window_left,
            "softmax_scale": softmax_scale,
        }
        out, lse = kernel.forward(q, k, v, cu_seqlens, cu_seqlens, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # type: ignore[override]
        gradients = ctx.kernel.backward(
            dout, *ctx.saved_tensors, ctx.cu_seqlens, ctx.cu_seqlens, **ctx.options
        )
        return *gradients, None, None, None, None
