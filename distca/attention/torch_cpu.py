"""torch's fused CPU attention, which returns the LSE.

`aten._scaled_dot_product_flash_attention_for_cpu` aligns its causal mask to the upper left and
takes one sequence at a time. So each task is cut into *tiles* that it can run: the rectangle before
the diagonal, the square on the diagonal, and for windows short bands with an additive mask. Tiles
of the same queries merge by LSE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from distca.attention.kernel import Gradients, KernelTasks, Outputs
from distca.attention.merge import merge_partial
from distca.attention.paged import PagedKeys
from distca.attention.paged_cpu import attend_paged, load_paged, suits
from distca.attention.softcap import CappedCpuAttention

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_BAND = 128
"""Rows of a windowed task's band: enough for the kernel's speed, few beside a usual window."""


@dataclass(frozen=True)
class _Tile:
    """One call's query and key rows; `diagonal`: a causal square; `mask`: added to the scores."""

    q: slice
    kv: slice
    diagonal: bool = False
    mask: torch.Tensor | None = None


class TorchCpuKernel:
    """torch's fused CPU attention as a `Kernel`, one tile at a time."""

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
        into: Outputs | None = None,
    ) -> Outputs:
        if into is None:
            into = q_THD.new_empty(q_THD.shape), q_THD.new_empty(q_THD.shape[:2], dtype=torch.float)
        out, lse = into[0].zero_(), into[1].fill_(float("-inf"))
        run, merged_to = _forward_of(tasks), 0
        for tile in _tiles(tasks, q_THD.dtype):
            part_out, part_lse = run(
                _heads_first(q_THD[tile.q]),
                _heads_first(k_THD[tile.kv]),
                _heads_first(v_THD[tile.kv]),
                0.0,
                tile.diagonal,
                attn_mask=tile.mask,
                scale=tasks.softmax_scale,
            )
            part_out, part_lse = part_out[0].transpose(0, 1), part_lse[0].transpose(0, 1)
            if tile.q.start >= merged_to:
                out[tile.q] = part_out
                lse[tile.q] = part_lse
            else:
                merge_partial(out, lse, tile.q, part_out, part_lse)
            merged_to = max(merged_to, tile.q.stop)
        return out, lse

    def forward_paged(
        self,
        q_THD: torch.Tensor,
        k_SHD: torch.Tensor,
        v_SHD: torch.Tensor,
        tasks: KernelTasks,
        keys: PagedKeys,
        into: Outputs | None = None,
    ) -> Outputs:
        """See `PagedKernel.forward_paged`: our own code computes decodes, if it could be compiled;
        for torch each run of blocks is a view of the pool."""
        assert not tasks.causal, "a pool's rows lie in the order of blocks"
        if into is None:
            into = q_THD.new_empty(q_THD.shape), q_THD.new_empty(q_THD.shape[:2], dtype=torch.float)
        if suits(q_THD, k_SHD, tasks) and (compiled := load_paged()) is not None:
            attend_paged(compiled, q_THD, k_SHD, v_SHD, tasks, keys, into)
            return into
        (out, lse), run = into, _forward_of(tasks)
        edges = tasks.cu_seqlens_q.tolist()
        for start, stop, runs in zip(edges, edges[1:], keys.runs, strict=False):
            if start == stop:
                continue
            rows, first = slice(start, stop), True
            if not runs:
                out[rows], lse[rows] = 0.0, float("-inf")
            for begin, end in runs:
                part_out, part_lse = run(
                    _heads_first(q_THD[rows]),
                    _heads_first(k_SHD[begin:end]),
                    _heads_first(v_SHD[begin:end]),
                    scale=tasks.softmax_scale,
                )
                part_out, part_lse = part_out[0].transpose(0, 1), part_lse[0].transpose(0, 1)
                if first:
                    out[rows], lse[rows], first = part_out, part_lse, False
                else:
                    merge_partial(out, lse, rows, part_out, part_lse)
        return into

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
        gradients = into or tuple(x.new_empty(x.shape) for x in (q_THD, k_THD, v_THD))
        for gradient in gradients:
            gradient.zero_()
        cap = tasks.softcap
        run = _BACKWARD if cap is None else CappedCpuAttention(cap).backward
        for tile in _tiles(tasks, q_THD.dtype):
            parts = run(
                _heads_first(dout_THD[tile.q]),
                _heads_first(q_THD[tile.q]),
                _heads_first(k_THD[tile.kv]),
                _heads_first(v_THD[tile.kv]),
                _heads_first(out_THD[tile.q]),
                lse_TH[tile.q].transpose(0, 1)[None],
                0.0,
                tile.diagonal,
                attn_mask=tile.mask,
                scale=tasks.softmax_scale,
            )
            for total, part, rows in zip(gradients, parts, (tile.q, tile.kv, tile.kv), strict=True):
                total[rows] += part[0].transpose(0, 1)
        return gradients  # type: ignore[return-value]


def _forward_of(tasks: KernelTasks) -> Callable[..., Outputs]:
    """Returns the operator that computes a tile."""
    return _FORWARD if tasks.softcap is None else CappedCpuAttention(tasks.softcap).forward


def _heads_first(x_THD: torch.Tensor) -> torch.Tensor:
    """`[T, H, D]` -> `[1, H, T, D]`, without a copy."""
    return x_THD.transpose(0, 1)[None]


def _tiles(tasks: KernelTasks, dtype: torch.dtype) -> Iterator[_Tile]:
    """The tiles of all tasks in order; rows that see no key are in none."""
    q_edges, kv_edges = tasks.cu_seqlens_q.tolist(), tasks.cu_seqlens_kv.tolist()
    window_left = tasks.window_left
    for task in range(len(q_edges) - 1):
        q, q_end = q_edges[task], q_edges[task + 1]
        kv, kv_end = kv_edges[task], kv_edges[task + 1]
        if q == q_end or kv == kv_end:
            continue
        if not tasks.causal:
            yield _Tile(slice(q, q_end), slice(kv, kv_end))
            continue
        # The first rows of a task with more queries than keys see nothing.
        q = max(q, q_end - (kv_end - kv))
        before = (kv_end - kv) - (q_end - q)
        if window_left is not None and window_left < kv_end - kv - 1:
            yield from _bands(q, q_end, kv, before, window_left, dtype)
            continue
        if before:
            yield _Tile(slice(q, q_end), slice(kv, kv + before))
        yield _Tile(slice(q, q_end), slice(kv + before, kv_end), diagonal=True)


def _bands(
    q: int, q_end: int, kv: int, before: int, window_left: int, dtype: torch.dtype
) -> Iterator[_Tile]:
    """Bands of a windowed task's rows, each with the keys that any of its rows sees.

    Row `q + i` sees the keys `kv + max(0, i + before - window_left) .. kv + i + before`.
    """
    for start in range(q, q_end, _BAND):
        stop = min(start + _BAND, q_end)
        first, last = start - q + before, stop - q + before
        first_key = max(0, first - window_left)
        distance = torch.arange(first, last)[:, None] - torch.arange(first_key, last)[None, :]
        mask = torch.zeros(distance.shape, dtype=dtype)
        mask.masked_fill_((distance < 0) | (distance > window_left), float("-inf"))
        yield _Tile(slice(start, stop), slice(kv + first_key, kv + last), mask=mask[None, None])
