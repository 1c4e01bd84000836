"""Merging partial attention outputs whose keys were split, by their LSE."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def merge_partial(
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    rows: torch.Tensor | slice,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    take: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
) -> None:
    """Merges a partial output into rows of another, in place.

    Both are attention over disjoint parts of a row's keys; afterwards `out_THD` and `lse_TH` are
    attention over their union. Sums are in float32 and then rounded to the dtype of `out_THD`, so
    each merge costs one rounding. An LSE of minus infinity stands for no keys.

    Args:
        out_THD: `[rows, heads, head_dim]`.
        lse_TH: float32 `[rows, heads]`.
        rows: rows to merge into: distinct, int64 `[n]`, or a slice of n.
        part_out: `[n, heads, head_dim]`.
        part_lse: float32 `[n, heads]`.
        take: gives a temporary tensor of a shape and dtype, at most
            `distca.cost.memory.merge_bytes` in all; None: temporaries are allocated.
    """
    if take is None:
        take = partial(_allocate, device=out_THD.device)
    lse = _read(lse_TH, rows, take)
    merged = torch.logaddexp(lse, part_lse, out=take(lse.shape, lse.dtype))
    # Where neither side has a key, every weight is 0 rather than exp(-inf + inf).
    lowest = torch.finfo(merged.dtype).min
    reference = torch.clamp(merged, min=lowest, out=take(lse.shape, lse.dtype))
    weight = lse.sub_(reference).exp_()
    part_weight = torch.sub(part_lse, reference, out=take(lse.shape, lse.dtype)).exp_()

    out = _read(out_THD, rows, take)
    total = take(out.shape, torch.float32).copy_(out).mul_(weight.unsqueeze(-1))
    part = take(out.shape, torch.float32).copy_(part_out).mul_(part_weight.unsqueeze(-1))
    _write(out_THD, rows, out.copy_(total.add_(part)))
    _write(lse_TH, rows, merged)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _read(
    tensor: torch.Tensor,
    rows: torch.Tensor | slice,
    take: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
) -> torch.Tensor:
    """A copy of some rows."""
    if isinstance(rows, slice):
        part = tensor[rows]
        return take(part.shape, part.dtype).copy_(part)
    into = take((len(rows), *tensor.shape[1:]), tensor.dtype)
    return torch.index_select(tensor, 0, rows, out=into)


def _write(tensor: torch.Tensor, rows: torch.Tensor | slice, values: torch.Tensor) -> None:
    if isinstance(rows, slice):
        tensor[rows] = values
    else:
        tensor.index_copy_(0, rows, values)
