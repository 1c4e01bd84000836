"""Jobs of the fused kernels, and their launches.

A job says where rows come from, what they are made of, and where they go. Jobs of any tensors are
done in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distca.attention.merge import LseMerge, Sums

_TILE = 2048
"""Elements that a program handles at a time: 16 for each of its threads."""
_LOAD_BYTES = 16
"""Bytes that a thread loads at a time, at most."""


class Before(NamedTuple):
    """Rows of another kind that lie among those of a memory.

    Attributes:
        rows: how many lie before each row, int64 `[rows]`.
        stride: elements that each of them takes up.
    """

    rows: torch.Tensor
    stride: int


@dataclass(frozen=True)
class RowMemory:
    """Memory of a tensor's rows.

    Attributes:
        rows: the tensor, `[rows, ...]`. Its rows may lie apart; a row's elements lie side by side.
        before: rows of another kind among them, which `rows` does not count, or None.
    """

    rows: torch.Tensor
    before: Before | None = None

    @property
    def stride(self) -> int:
        """Elements from a row to the next."""
        return self.rows.stride(0)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.rows.shape[1:])

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from a row to the next, and for each row of the other kind."""
        return self.stride, 0 if self.before is None else self.before.stride


@dataclass(frozen=True)
class RowJob:
    """Rows of one tensor that are copied, or are sums.

    Attributes:
        source: memory of the rows that they are made of.
        into: memory where they go, of the same dtype.
        rows: how many are made; with `sums` they are as many as these have.
        sums: which rows of the source each is made of; None: the ones of the same numbers.
        other: memory of the rows of the source from `local` on; None: all are in `source`.
        local: rows of the source before those of `other`.
    """

    source: RowMemory
    into: RowMemory
    rows: int
    sums: Sums | None = None
    other: RowMemory | None = None
    local: int = 0


class FusedKernels:
    """Launches of the fused kernels.

    Args:
        kernels: the module of the kernels, `triton_kernels`, or what stands for it.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def make_rows(self, jobs: Sequence[RowJob]) -> None:
        """Does all jobs in one launch; without rows there is none.

        Sums are in float32 and in the order of their parts, and rounded once: those of
        `distca.attention.merge.sum_parts`.
        """
        jobs = [each for each in jobs if each.rows and each.source.width]
        if not jobs:
            return
        units = tuple(_unit(job.source, job.into, job.other) for job in jobs)
        widths = tuple(job.source.width for job in jobs)
        columns = tuple(min(power_of_2(width), _TILE) for width in widths)
        blocks = (-(-job.rows // (_TILE // each)) for job, each in zip(jobs, columns, strict=True))
        self._kernels.make_rows[max(blocks), len(jobs)](
            tuple(job.source.rows for job in jobs),
            tuple(None if job.other is None else job.other.rows for job in jobs),
            tuple(_before(job.source) for job in jobs),
            tuple(None if job.sums is None else job.sums.parts for job in jobs),
            tuple(None if job.sums is None else job.sums.begins for job in jobs),
            tuple(job.into.rows for job in jobs),
            tuple(_before(job.into) for job in jobs),
            encoded(number for job in jobs for number in _counts(job)),
            encoded(
                stride // unit
                for job, unit in zip(jobs, units, strict=True)
                for stride in _strides(job)
            ),
            widths,
            columns,
            units,
            _TILE,
        )

    def merge_rows(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        merge: LseMerge,
        into_out: RowMemory,
        into_lse: RowMemory,
    ) -> None:
        """Merges partial outputs by their LSE, as `distca.attention.merge.merge_shared` does, and
        writes all rows where they go; without rows nothing is launched.

        Args:
            out: partial outputs, `[parts, heads, head_dim]`, whose rows may lie apart.
            lse: their LSE, float32 `[parts, heads]`, likewise.
            merge: which partial rows make up each row. Some rows have several.
            into_out: memory of the rows' outputs, of the dtype of `out`.
            into_lse: memory of their LSE, which has the same rows of another kind among them.
        """
        rows, (heads, head_dim), merges = merge.rows.shape[0], out.shape[1:], merge.merges
        assert merges is not None, "rows without several parts are copied"
        if not rows:
            return
        units = _unit(RowMemory(out), into_out), _unit(RowMemory(lse), into_lse)
        strides = (
            stride // unit
            for source, into, unit in zip((out, lse), (into_out, into_lse), units, strict=True)
            for stride in (source.stride(0), *into.strides)
        )
        columns = power_of_2(head_dim)
        at_once = min(power_of_2(heads), max(1, _TILE // columns))
        self._kernels.merge_rows[rows, -(-heads // at_once)](
            out,
            lse,
            merge.rows,
            merges.members,
            merges.begins,
            into_out.rows,
            into_lse.rows,
            _before(into_out),
            encoded((merge.parts, merges.begins.shape[0], merges.members.shape[0])),
            encoded(strides),
            heads,
            head_dim,
            *units,
            at_once,
            columns,
        )

    def finish_outputs(
        self,
        found: torch.Tensor,
        found_lse_HT: torch.Tensor,
        into: torch.Tensor,
        into_lse_TH: torch.Tensor,
    ) -> None:
        """Writes outputs, unless they are there, and their LSE, with plus infinity as minus
        infinity; there must be rows.

        Args:
            found: outputs, `[rows, heads, head_dim]`.
            found_lse_HT: LSE, float32 `[heads, rows]`, whose rows lie side by side.
            into: where outputs go.
            into_lse_TH: where LSE go.
        """
        source, target = RowMemory(found), RowMemory(into)
        there = found.data_ptr() == into.data_ptr()
        unit, columns = _unit(source, target), min(power_of_2(source.width), 256)
        block = _TILE // columns
        self._kernels.finish_outputs[(-(-found.shape[0] // block),)](
            None if there else found,
            found_lse_HT,
            None if there else into,
            into_lse_TH,
            encoded((found.shape[0],)),
            encoded(
                (
                    source.stride // unit,
                    found_lse_HT.stride(0),
                    target.stride // unit,
                    into_lse_TH.stride(0),
                )
            ),
            source.width,
            found_lse_HT.shape[0],
            unit,
            block,
            columns,
        )

    def write_rows(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        into_k: torch.Tensor,
        into_v: torch.Tensor,
    ) -> None:
        """Writes keys and values to their slots.

        Args:
            k: keys, `[rows, kv_heads, head_dim]`, whose rows may lie apart.
            v: values, likewise.
            slots: slot of each row, int64 `[rows]`. Two rows may have one slot if they are equal.
            into_k: keys by slot, `[slots, kv_heads, head_dim]`, contiguous.
            into_v: values by slot, likewise.
        """
        if not len(slots):
            return
        k, v = (each if each[0].is_contiguous() else each.contiguous() for each in (k, v))
        source, width = RowMemory(k), RowMemory(k).width
        unit = math.gcd(_unit(source, RowMemory(v)), width)
        strides = encoded(each.stride(0) // unit for each in (k, v))
        self._kernels.write_rows[len(slots), 2](
            *(k, v, slots, into_k, into_v, strides, width, unit),
            min(power_of_2(width), _TILE),
        )

    def normalize_rows(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounds: bool = False,
        added: float = 0.0,
    ) -> torch.Tensor:
        """Divides rows by the root of their mean square, and multiplies them by a weight.

        Args:
            rows: rows, `[..., width]`.
            weight: factor of each element, `[width]`.
            eps: is added to the mean square.
            rounds: whether rows are rounded to their dtype before they are multiplied.
            added: is added to the weight.

        Returns:
            The results, like the rows, contiguous.
        """
        rows = rows.contiguous()
        into, width = torch.empty_like(rows), rows.shape[-1]
        total = rows.numel() // width
        if total:
            columns = power_of_2(width)
            at_once = max(1, _TILE // columns)
            self._kernels.normalize_rows[(-(-total // at_once),)](
                *(rows, weight, into, encoded((total,)), eps),
                *(width, rounds, added, at_once, columns),
            )
        return into

    def rotate_heads(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries and keys by the angles of their rows.

        Args:
            q_THD: queries, `[rows, heads, head_dim]`, whose heads may lie apart.
            k_THD: keys, `[rows, kv_heads, head_dim]`, likewise.
            cos_TF: cosines of each row's angles, the first `head_dim / 2` of a row.
            sin_TF: sines, likewise.

        Returns:
            Both, rotated, contiguous.
        """
        into_q, into_k = q_THD.new_empty(q_THD.shape), k_THD.new_empty(k_THD.shape)
        rows, heads, head_dim = q_THD.shape
        kv_heads, half = k_THD.shape[1], head_dim // 2
        if rows:
            strides = *q_THD.stride()[:2], *k_THD.stride()[:2], cos_TF.stride(0), sin_TF.stride(0)
            unit = math.gcd(_LOAD_BYTES // q_THD.itemsize, *strides)
            columns, most = power_of_2(half), max(heads, kv_heads)
            at_once = min(power_of_2(most), max(1, _TILE // columns))
            tensors = q_THD, k_THD, cos_TF, sin_TF, into_q, into_k
            self._kernels.rotate_heads[rows, -(-most // at_once)](
                *tensors,
                encoded(each // unit for each in strides),
                *(heads, kv_heads, half, unit, at_once, columns),
                # Else a product that is added would not be rounded.
                enable_fp_fusion=False,
            )
        return into_q, into_k


def encoded(numbers: Iterable[int]) -> tuple[int, ...]:
    """Encodes numbers for kernels, as odd ones from 3 on.

    Triton compiles a kernel anew for a number that is 1, and for one that is a multiple of 16; in a
    tuple of numbers it cannot be asked not to.
    """
    return tuple(2 * each + 3 for each in numbers)


def power_of_2(number: int) -> int:
    """Returns the least power of two that is no less."""
    return 1 << (number - 1).bit_length()


def _before(memory: RowMemory) -> torch.Tensor | None:
    return None if memory.before is None else memory.before.rows


def _counts(job: RowJob) -> tuple[int, int, int]:
    return job.rows, 0 if job.sums is None else job.sums.parts.shape[0], job.local


def _strides(job: RowJob) -> tuple[int, ...]:
    source, into = job.source.strides, job.into.strides
    return source[0], 0 if job.other is None else job.other.stride, source[1], *into


def _unit(*memories: RowMemory | None) -> int:
    """Elements that all strides are multiples of, as many as a thread loads at most."""
    there = [each for each in memories if each is not None]
    strides = [stride for each in there for stride in each.strides]
    return math.gcd(_LOAD_BYTES // there[0].rows.itemsize, *strides)
