"""Merging partial attention outputs whose keys were split, by their LSE, and adding gradients.

Parts of one row are summed by `embedding_bag`: in float32 whatever their dtype, in a fixed order,
also on GPUs, and all rows in one kernel, however many parts they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from distca.plan.span import Int64s

Take = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Gives a temporary tensor of a shape and dtype."""

Gather = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Gives copies of the rows of two tensors with these numbers, int64."""

_SUM, _MAX = 0, 2
"""Modes of `torch.embedding_bag`."""


@dataclass(frozen=True)
class Merges:
    """Which of many partial rows merge. All are int64.

    Attributes:
        members: partial rows that share a row with others, row by row, `[members]`.
        numbers: 0, 1, 2, ..., `[members]`.
        begins: number of each shared row's first member, `[shared]`.
        row_of: shared row of each member, `[members]`.
    """

    members: torch.Tensor
    numbers: torch.Tensor
    begins: torch.Tensor
    row_of: torch.Tensor


@dataclass(frozen=True)
class Sums:
    """Rows that are sums of parts. All are int64.

    Attributes:
        parts: numbers of the parts, those of the first row first, `[parts]`.
        begins: place in `parts` of each row's first, `[rows]`; None: each row is one part.
    """

    parts: torch.Tensor
    begins: torch.Tensor | None


@dataclass(frozen=True)
class LseMerge:
    """Merges partial outputs to output rows by their LSE.

    Attributes:
        parts: number of partial rows.
        merges: partial rows that merge, and where to: merged rows follow the partial ones; None:
            each row has one part.
        rows: number of each output row among the partial and merged rows, int64 `[rows]`.
    """

    parts: int
    merges: Merges | None
    rows: torch.Tensor

    @property
    def with_merged(self) -> int:
        """Number of partial and merged rows."""
        return self.parts + (0 if self.merges is None else self.merges.begins.shape[0])


def sums_by_row(rows: Int64s, total: int) -> Sums:
    """Adds parts up: part `i` belongs to row `rows[i]` of `total`; below 0 it belongs to none."""
    order, counts = _by_row(rows, total)
    if (counts == 1).all():
        return Sums(torch.from_numpy(order), None)
    return Sums(torch.from_numpy(order), torch.from_numpy(np.cumsum(counts) - counts))


def _by_row(rows: Int64s, total: int) -> tuple[Int64s, Int64s]:
    """Numbers of the parts that belong to rows, row by row, and how many each row has."""
    order = np.argsort(rows, kind="stable")
    order = order[rows[order] >= 0]
    return order, np.bincount(rows[order], minlength=total)


def lse_merge(rows: Int64s, total: int) -> LseMerge:
    """Merges parts as `sums_by_row` adds them; a row without parts gets an arbitrary value."""
    order, counts = _by_row(rows, total)
    begins = np.cumsum(counts) - counts
    found = order[np.minimum(begins, len(order) - 1)] if len(order) else np.zeros_like(begins)
    shared = np.flatnonzero(counts > 1)
    found[shared] = len(rows) + np.arange(len(shared))
    merges = None
    if len(shared):
        members = order[np.repeat(counts > 1, counts)]
        of_shared = counts[shared]
        numbers, row_of = np.arange(len(members)), np.repeat(np.arange(len(shared)), of_shared)
        columns = members, numbers, np.cumsum(of_shared) - of_shared, row_of
        merges = Merges(*(torch.from_numpy(column) for column in columns))
    return LseMerge(len(rows), merges, torch.from_numpy(found))


def merge_shared(
    out_THD: torch.Tensor, lse_TH: torch.Tensor, merges: Merges, gather: Gather, take: Take
) -> None:
    """Merges the partial rows of each shared row, into the last rows of the same tensors.

    The parts are attention over disjoint parts of a row's keys; what is merged is attention over
    their union. Sums are in float32 and rounded once. An LSE of minus infinity stands for no keys.

    Args:
        out_THD: partial rows, then room for the shared rows, `[parts + shared, heads, head_dim]`.
        lse_TH: likewise, float32 `[parts + shared, heads]`.
        merges: which merge.
        gather: copies rows of both tensors.
        take: gives temporaries, at most `distca.cost.memory.merge_bytes` in all, with those of
            `gather`.
    """
    members, (heads, head_dim) = merges.members.shape[0], out_THD.shape[1:]
    shared = slice(out_THD.shape[0] - merges.begins.shape[0], None)
    parts, weights = gather(merges.members)
    # A weighted output and its weights lie side by side, so that one sum adds both.
    weighted = take((members, heads, head_dim + 1), torch.float32)
    # Where no part has a key, all weigh 1 rather than exp(-inf + inf): their outputs are 0.
    weights.clamp_(min=torch.finfo(weights.dtype).min)
    highest = _bag(weights, merges.numbers, merges.begins, _MAX)
    of_members = take((members, heads), torch.float32)
    weights.sub_(torch.index_select(highest, 0, merges.row_of, out=of_members))
    torch.exp(weights, out=weighted[..., -1])
    torch.mul(parts, weighted[..., -1:], out=weighted[..., :-1])
    sums = _bag(weighted.flatten(1), merges.numbers, merges.begins, _SUM)
    sums = sums.view(-1, heads, head_dim + 1)
    total = sums[..., -1]
    torch.div(sums[..., :-1], total.unsqueeze(-1), out=out_THD[shared])
    torch.add(highest, total.log(), out=lse_TH[shared])


def sum_parts(parts: torch.Tensor, sums: Sums, into: torch.Tensor | None = None) -> torch.Tensor:
    """Adds up parts in the order of `sums`, in float32, and rounds once; returns the rows.

    Args:
        parts: contiguous, `[parts, ...]`.
        sums: which of them each row is made of; a row of none is 0.
        into: memory for the rows; None: new memory.
    """
    if sums.begins is None:
        if into is None:
            return torch.index_select(parts, 0, sums.parts)
        return torch.index_select(parts, 0, sums.parts, out=into)
    rows = _bag(parts.flatten(1), sums.parts, sums.begins, _SUM).view(-1, *parts.shape[1:])
    return rows if into is None else into.copy_(rows)


def _bag(rows: torch.Tensor, which: torch.Tensor, begins: torch.Tensor, mode: int) -> torch.Tensor:
    return torch.embedding_bag(rows, which, begins, mode=mode)[0]


def merge_partial(
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    rows: slice,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Merges a partial output into rows of another, in place, as `merge_shared` does.

    Args:
        out_THD: `[rows, heads, head_dim]`.
        lse_TH: float32 `[rows, heads]`.
        rows: n rows to merge into.
        part_out: `[n, heads, head_dim]`.
        part_lse: float32 `[n, heads]`.
    """
    out, lse = out_THD[rows], lse_TH[rows]
    merged = torch.logaddexp(lse, part_lse)
    # Where neither side has a key, every weight is 0 rather than exp(-inf + inf).
    reference = merged.clamp(min=torch.finfo(merged.dtype).min)
    weight, part_weight = (torch.exp(each - reference).unsqueeze(-1) for each in (lse, part_lse))
    out.copy_(out.float() * weight + part_out.float() * part_weight)
    lse.copy_(merged)


def merge_rows(
    out_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    rows: slice | torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Merges partial outputs, as they come, into rows that sum up those before, in place.

    Args:
        out_THD: sums, `[rows, heads, head_dim]`, in float32 where outputs are of less.
        lse_TH: float32 `[rows, heads]`; minus infinity, with outputs of 0, where there were none.
        rows: n rows to merge into, or their distinct numbers, int64.
        part_out: `[n, heads, head_dim]`, of any dtype.
        part_lse: float32 `[n, heads]`.
    """
    out, lse = out_THD[rows], lse_TH[rows]
    # Where neither side has a key, what there is stays.
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0).unsqueeze(-1)
    out.lerp_(part_out.to(out.dtype), weight.to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)
    if isinstance(rows, torch.Tensor):
        out_THD.index_copy_(0, rows, out)
        lse_TH.index_copy_(0, rows, lse)
