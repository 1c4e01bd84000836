"""Soft caps: scores `s` become `cap * tanh(s / cap)` before masks and the softmax, as in Gemma 2.

FlashAttention's packages have them. torch's fused CPU attention has not, so that here it is written
out, with its exact backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from distca.attention.kernel import Gradients, KernelTasks, Outputs
from distca.attention.paged import KeyTable, PagedKernel, PagedKeys, TableKernel

_BAND = 256
"""Query rows whose scores are in memory at a time."""


@dataclass(frozen=True)
class SoftCapped:
    """A kernel that caps the scores of all its tasks.

    Attributes:
        kernel: kernel that computes.
        softcap: bound of the scores.
    """

    kernel: PagedKernel
    softcap: float

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
        into: Outputs | None = None,
    ) -> Outputs:
        """See `Kernel.forward`."""
        return self.kernel.forward(q_THD, k_THD, v_THD, self._capped(tasks), into)

    def forward_paged(
        self,
        q_THD: torch.Tensor,
        k_SHD: torch.Tensor,
        v_SHD: torch.Tensor,
        tasks: KernelTasks,
        keys: PagedKeys,
        into: Outputs | None = None,
    ) -> Outputs:
        """See `PagedKernel.forward_paged`."""
        return self.kernel.forward_paged(q_THD, k_SHD, v_SHD, self._capped(tasks), keys, into)

    def reads_table(self, head_dim: int) -> bool:
        """See `TableKernel.reads_table`."""
        return isinstance(self.kernel, TableKernel) and self.kernel.reads_table(head_dim)

    def forward_table(
        self,
        q_THD: torch.Tensor,
        k_SHD: torch.Tensor,
        v_SHD: torch.Tensor,
        table: KeyTable,
        softmax_scale: float,
        window_left: int | None = None,
        softcap: float | None = None,
    ) -> Outputs:
        """See `TableKernel.forward_table`."""
        assert isinstance(self.kernel, TableKernel), "a kernel that reads no tables"
        given = q_THD, k_SHD, v_SHD, table, softmax_scale, window_left, self.softcap
        return self.kernel.forward_table(*given)

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
        """See `Kernel.backward`."""
        inputs = dout_THD, q_THD, k_THD, v_THD, out_THD, lse_TH
        return self.kernel.backward(*inputs, self._capped(tasks), into)

    def _capped(self, tasks: KernelTasks) -> KernelTasks:
        return replace(tasks, softcap=self.softcap)


@dataclass(frozen=True)
class CappedCpuAttention:
    """What torch's fused CPU operators do, with their shapes and arguments, and a soft cap.

    Queries and outputs are `[1, heads, queries, head_dim]`, keys and values the same with
    `kv_heads`, the LSE is `[1, heads, queries]`.
    """

    softcap: float

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output, and the LSE in float32."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for rows, keys in _bands(q, k, is_causal):
            scores, _ = self._scores(q, k, rows, keys, is_causal, attn_mask, scale)
            band_lse = scores.logsumexp(-1)
            weights = torch.exp(scores - band_lse.unsqueeze(-1))
            out[0, :, rows] = (weights @ v[0, :, None, keys].float()).flatten(0, 1).to(out.dtype)
            lse[0, :, rows] = band_lse.flatten(0, 1)
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float,
    ) -> Gradients:
        """Returns the gradients of queries, keys and values, in float32."""
        dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
        dots = (dout.float() * out.float()).sum(-1)
        for rows, keys in _bands(q, k, is_causal):
            scores, slope = self._scores(q, k, rows, keys, is_causal, attn_mask, scale)
            d_out, query, row_lse, row_dots = (
                _by_group(x[0, :, rows], k) for x in (dout.float(), q.float(), lse, dots)
            )
            weights = torch.exp(scores - row_lse.unsqueeze(-1))
            d_weights = d_out @ v[0, :, None, keys].float().transpose(-1, -2)
            d_scores = weights * (d_weights - row_dots.unsqueeze(-1)) * slope * scale
            dq[0, :, rows] = (d_scores @ k[0, :, None, keys].float()).flatten(0, 1)
            dk[0, :, keys] += (d_scores.transpose(-1, -2) @ query).sum(1)
            dv[0, :, keys] += (weights.transpose(-1, -2) @ d_out).sum(1)
        return dq, dk, dv

    def _scores(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        rows: slice,
        keys: slice,
        is_causal: bool,
        attn_mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the masked scores of some rows, `[kv_heads, group, rows, keys]`, and the cap's
        derivative."""
        key = k[0, :, None, keys].float().transpose(-1, -2)
        bounded = torch.tanh(_by_group(q[0, :, rows].float(), k) @ key * (scale / self.softcap))
        scores = bounded * self.softcap
        if attn_mask is not None:
            scores = scores + attn_mask[0, 0, rows, keys]
        if is_causal:
            row, column = (torch.arange(each.start, each.stop) for each in (rows, keys))
            scores = scores.masked_fill(column > row[:, None], float("-inf"))
        return scores, 1 - bounded.square()


def _by_group(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`[heads, ...]` -> `[kv_heads, group, ...]`."""
    return x.reshape(k.shape[1], -1, *x.shape[1:])


def _bands(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """Bands of query rows, each with the keys that it may see."""
    for start in range(0, q.shape[2], _BAND):
        stop = min(start + _BAND, q.shape[2])
        yield slice(start, stop), slice(0, stop if is_causal else k.shape[2])
