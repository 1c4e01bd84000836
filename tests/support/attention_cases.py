"""Tasks of kernels, their inputs, and attention as it is defined."""

from __future__ import annotations

import numpy as np
import torch

from distca.attention import KernelTasks
from distca.attention.reference import attend_tasks

SCALE = 0.35
Case = list[tuple[int, int]]
CASES: list[tuple[str, Case, bool, int | None]] = [
    ("squares", [(64, 64), (1, 1), (130, 130)], True, None),
    ("more keys than queries", [(5, 64), (1, 300), (128, 129)], True, None),
    ("more queries than keys", [(10, 4), (3, 1)], True, None),
    ("full rectangles", [(7, 100), (1, 1), (200, 3)], False, None),
    ("windows", [(300, 300), (5, 64), (1, 9), (140, 200)], True, 17),
    ("a window of one", [(9, 9), (2, 5)], True, 0),
    ("a window wider than the task", [(9, 9)], True, 50),
    ("no keys", [(3, 0), (4, 4)], True, None),
    ("no tasks", [], True, None),
]


def make_inputs(
    case: Case,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    value_dim: int | None = None,
):
    generator = torch.Generator().manual_seed(len(case))
    queries, keys = sum(q for q, _ in case), sum(k for _, k in case)
    shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
    dims = dim, dim, value_dim or dim, value_dim or dim
    tensors = [
        torch.randn(*s, d, generator=generator).to(dtype) for s, d in zip(shapes, dims, strict=True)
    ]
    edges = [
        torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        for lengths in ([q for q, _ in case], [k for _, k in case])
    ]
    return tensors, edges


def reference(tensors, edges, causal: bool, window: int | None, softcap: float | None = None):
    """Output, LSE and gradients, task by task, in float64."""
    q, k, v, dout = tensors
    tasks = KernelTasks(*edges, causal, window, SCALE, softcap)
    return attend_tasks(dout, q, k, v, tasks)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = expected[expected.isfinite()].abs().max() if expected.numel() else 1.0
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=float(tolerance * max(float(scale), 1.0))
    )
