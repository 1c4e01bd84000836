"""Compiles the fused kernels for GPUs that are not there, in a process of its own.

It writes what it found to standard output, as JSON: for each GPU and launch what the PTX has.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from distca.attention.fused import (
    ClampedGate,
    ExpertKernels,
    FusedKernels,
    RowJob,
    RowMemory,
    triton_experts,
    triton_kernels,
)
from distca.attention.fused.jobs import Before
from distca.attention.merge import Sums, lse_merge, sums_by_row

CAPABILITIES = 80, 90, 100
PLANS = 5, 16
"""Rows of two plans; numbers that are multiples of 16 would be a kind of their own."""
_KERNELS = (
    *("make_rows", "merge_rows", "finish_outputs"),
    *("write_rows", "normalize_rows", "rotate_heads"),
)
_OF_EXPERTS = "sort_rows", "gate_rows", "combine_rows"
GQA, MLA = (32, 8, 128, 128), (16, 16, 192, 128)
"""Heads of queries and of keys, elements of a key's head and of a value's."""


_ARITHMETIC = re.compile(r"(?:mul|add|sub|fma)\.rn\.bf16")


class _Machine:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


class _Compiled:
    """Stands for a kernel: compiles where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.made = kernel, list[Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.made.append(
            self.kernel.warmup(*arguments, grid=grid, **options)
        )


def launches(kernels: FusedKernels, rows: int, heads: tuple[int, ...], dtype: torch.dtype) -> None:
    """One launch of each kind: copies to messages, calls' rows, sums, a merge, outputs, layers'."""
    of_q, of_kv, key_dim, value_dim = heads
    q, k, v = (
        torch.empty(rows, number, size, dtype=dtype)
        for number, size in ((of_q, key_dim), (of_kv, key_dim), (of_kv, value_dim))
    )
    out, lse = q.new_empty(rows, of_q, value_dim), torch.empty(rows, of_q)
    index = torch.arange(rows)
    sizes = [each[0].numel() * each.itemsize for each in (out, out, lse, q, k, v)]
    between = [(index, sum(sizes[4:])), (index, sum(sizes[:4]))]
    copies = []
    for number, each in enumerate((out, out, lse, q, k, v)):
        before, others = between[number > 3]
        packed = sum(sizes[4:] if number > 3 else sizes[:4]) // each.itemsize
        into = each.new_empty(rows, packed)[:, : each[0].numel()].view(each.shape)
        target = RowMemory(into, Before(before, others // each.itemsize))
        copies.append(RowJob(RowMemory(each), target, rows, Sums(index, None)))
    kernels.make_rows(copies)
    kernels.make_rows(
        [
            RowJob(RowMemory(x), RowMemory(x.clone()), rows, Sums(index, None), RowMemory(x), rows)
            for x in (q, k, v)
        ]
    )
    sums = sums_by_row(np.arange(rows) // 2, rows)
    kernels.make_rows([RowJob(RowMemory(x), RowMemory(x.clone()), rows, sums) for x in (q, k, v)])
    merge = lse_merge(np.arange(rows) // 2, rows)
    kernels.merge_rows(out, lse, merge, RowMemory(out.clone()), RowMemory(lse.clone()))
    kernels.finish_outputs(out, lse.T.contiguous(), out.clone(), lse)
    kernels.write_rows(k, k, index, k.clone(), k.clone())
    kernels.normalize_rows(q.flatten(1), q[0].flatten(), 1e-5, rounds=True)
    kernels.rotate_heads(q, k, q[:, 0], q[:, 0])


def expert_launches(kernels: ExpertKernels, rows: int, dtype: torch.dtype) -> None:
    """Those of eight experts of a row, with SiLU, and then clamped and with biases."""
    source, weights = torch.empty(rows, 2048, dtype=dtype), torch.empty(rows, 8, dtype=dtype)
    chosen = torch.zeros(rows, 8, dtype=torch.int64)
    experts, bias = chosen.flatten(), source.new_empty(128, 2048)
    placed = kernels.sort_rows(source, experts, torch.arange(8 * rows), 128)
    for gate, of_place, of_pair, its in (
        (None, None, None, None),
        (ClampedGate(1.702, 7.0), experts, chosen, bias),
    ):
        kernels.gate_rows(placed.rows, gate, of_place, its)
        kernels.combine_rows(placed.rows, placed.places, weights, of_pair, its)


def main() -> dict[str, Any]:
    """Compiles all launches for all GPUs."""
    found: dict[str, Any] = {}
    for capability in CAPABILITIES:
        driver.set_active(_Machine(capability))
        for name, heads, dtype in (
            ("GQA, bfloat16", GQA, torch.bfloat16),
            ("MLA, float32", MLA, torch.float32),
        )[: 1 + (capability == CAPABILITIES[0])]:
            compiled = {each: _Compiled(getattr(triton_kernels, each)) for each in _KERNELS}
            of_experts = {each: _Compiled(getattr(triton_experts, each)) for each in _OF_EXPERTS}
            kernels = FusedKernels(type("Kernels", (), compiled))
            for rows in PLANS:
                launches(kernels, rows, heads, dtype)
                expert_launches(ExpertKernels(type("Experts", (), of_experts)), rows, dtype)
            for each, its in (compiled | of_experts).items():
                half = len(its.made) // len(PLANS)
                for number, kernel in enumerate(its.made[:half]):
                    ptx = kernel.asm["ptx"]
                    found[f"sm_{capability}, {name}, {each} {number}"] = {
                        "target": f".target sm_{capability}" in ptx,
                        "binary": len(kernel.asm["cubin"]),
                        "wide loads": ptx.count("ld.global.v4.b32"),
                        "wide stores": ptx.count("st.global.v4.b32"),
                        "rounds to nearest": "cvt.rn.bf16" in ptx,
                        "bfloat16 arithmetic": len(_ARITHMETIC.findall(ptx)),
                        "serves any plan": kernel is its.made[half + number],
                    }
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()))
