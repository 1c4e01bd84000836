"""Merging partial attention outputs whose keys were split, by their LSE."""

from __future__ import annotations

import torch


def merge_partial(
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    rows: torch.Tensor | slice,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Merges a partial output into rows of another, in place.

    Each is attention over some of a row's keys; afterwards `out_THD` and `lse_TH` are attention
    over both. Computed in float32; an LSE of minus infinity stands for no keys.

    Args:
        out_THD: `[rows, heads, head_dim]`.
        lse_TH: float32 `[rows, heads]`.
        rows: which rows, distinct int64 `[n]` or a slice of n.
        part_out: `[n, heads, head_dim]`.
        part_lse: float32 `[n, heads]`.
    """
    out, lse = out_THD[rows], lse_TH[rows]
    merged = torch.logaddexp(lse, part_lse)
    # Where neither side has a key, every weight is 0 rather than exp(-inf + inf).
    reference = merged.masked_fill(merged == float("-inf"), 0.0)
    weight = torch.exp(lse - reference).unsqueeze(-1)
    part_weight = torch.exp(part_lse - reference).unsqueeze(-1)
    out_THD[rows] = (out.float() * weight + part_out.float() * part_weight).to(out_THD.dtype)
    lse_TH[rows] = merged
