"""The interface of an attention kernel: (q, k, v, tasks) -> (out, LSE), and its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

Outputs = tuple[torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KernelTasks:
    """Tasks of one shape, whose rows are concatenated in task order.

    With `causal`, a task ends on the diagonal (aligned to the lower right): row `r` of `nq` sees
    the keys up to `r + nkv - nq`, and with `window_left` none before `r + nkv - nq - window_left`.
    Otherwise every row sees every key.

    Attributes:
        cu_seqlens_q: first query row of each task, and the total: int32 `[tasks + 1]` on the CPU.
        cu_seqlens_kv: first key row of each task, and the total, likewise.
        causal: whether the tasks end on the diagonal; otherwise they are full rectangles.
        window_left: earlier tokens that a query of a causal task sees; None: all.
        softmax_scale: factor of the scores.
        softcap: bound of the scores, which `softcap * tanh(score / softcap)` replaces, or None.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    causal: bool
    window_left: int | None
    softmax_scale: float
    softcap: float | None = None


class Kernel(Protocol):
    """Variable-length attention over tasks of one shape.

    Shapes: `q_THD` `[queries, heads, head_dim]`; `k_THD` `[keys, kv_heads, head_dim]`, `heads` a
    multiple of `kv_heads`; `v_THD` `[keys, kv_heads, v_head_dim]`, and outputs `[queries, heads,
    v_head_dim]`; `lse_TH` float32 `[queries, heads]`. A row that sees no key has output 0, LSE
    minus infinity and no gradient. The rows of any tensor may lie apart from each other in memory,
    at multiples of 16 bytes; a row's elements lie side by side.

    Kernels take heads of one size for keys and values, but for `select_kernel_of_heads`'s.
    """

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
        into: Outputs | None = None,
    ) -> Outputs:
        """Returns `(out_THD, lse_TH)`, written to `into` if given; the output has the dtype of
        `q_THD`."""
        ...

    def backward(
        self,
        dout_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        tasks: KernelTasks,
        into: Gradients | None = None,
    ) -> Gradients:
        """Returns `(dq, dk, dv)`, written to `into` if given. They are exact for partial tasks,
        too, if `out_THD` and `lse_TH` are the rows' final output and LSE, over all their keys in
        all tasks."""
        ...
