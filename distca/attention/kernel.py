"""The interface of an attention kernel: (q, k, v, spans) -> (out, LSE), and its backward."""

from __future__ import annotations

from typing import Protocol

import torch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Kernel(Protocol):
    """Variable-length attention over tasks of one shape, one after the other in each tensor.

    Shapes: `q_THD` `[queries, heads, head_dim]`; `k_THD`, `v_THD` `[keys, kv_heads, head_dim]`,
    `heads` a multiple of `kv_heads`; `lse_TH` float32 `[queries, heads]`; `cu_seqlens_*` int32
    `[tasks + 1]` on the CPU, where each task's rows start.

    With `causal`, a task ends on the diagonal (aligned to the lower right): row `r` of `nq` sees
    the keys up to `r + nkv - nq`, and with `window_left` none before `r + nkv - nq - window_left`.
    Otherwise every row sees every key. A row that sees no key has output 0, LSE minus infinity
    and no gradient.
    """

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        *,
        causal: bool,
        window_left: int | None,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out_THD` in the dtype of `q_THD`, `lse_TH)`."""
        ...

    def backward(
        self,
        dout_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        *,
        causal: bool,
        window_left: int | None,
        softmax_scale: float,
    ) -> Gradients:
        """`(dq, dk, dv)`, exact for partial tasks, too, where `out_THD` and `lse_TH` are the final
        ones of the rows, over all their keys in all tasks."""
        ...
