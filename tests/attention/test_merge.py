"""Merging partial outputs in bfloat16: in float32, and rounded once a merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distca.attention import KernelTasks, select_kernel
from distca.attention.merge import merge_partial
from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Plan
from distca.runtime import Buffers, CoreAttention, ProgramRun, build_exchange
from distca.transport.virtual import VirtualTransport
from support.random_plans import random_lengths, random_plan

ROUNDING = 2.0**-8
"""Of bfloat16: at most so much of what is rounded."""
CPU = torch.device("cpu")
SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16)
SCALE = 0.3


def merge_exactly(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Parts `[parts, rows, heads, head_dim]` and `[parts, rows, heads]`, in float64."""
    weights = torch.softmax(lses.double(), dim=0).unsqueeze(-1)
    return (weights * outs.double()).sum(dim=0)


def assert_rounded(out: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Each part but a row's first may have cost a rounding of what is no larger than a part."""
    merges = lses.isfinite().sum(dim=0).unsqueeze(-1) - 1
    bound = merges * ROUNDING * outs.double().abs().amax(dim=0)
    assert ((out.double() - merge_exactly(outs, lses)).abs() <= 1.001 * bound).all()


@pytest.mark.parametrize("parts", range(2, 8))
@pytest.mark.parametrize("rows", [slice(0, 300), torch.randperm(300)], ids=["slice", "index"])
def test_a_merge_rounds_once(parts: int, rows: slice | torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(parts)
    outs = torch.randn(parts, 300, 4, 16, generator=generator).bfloat16()
    lses = 3 + 2 * torch.randn(parts, 300, 4, generator=generator)
    out, lse = outs[0].clone(), lses[0].clone()
    expected = out.clone()
    for part in range(1, parts):
        before = torch.stack([expected, outs[part]]), torch.stack([lse, lses[part]])
        expected = merge_exactly(*before).bfloat16()
        merge_partial(out, lse, rows, outs[part][rows], lses[part][rows])
    # Where float64 and float32 lie on different sides of a tie.
    assert (out != expected).double().mean() < 1e-3
    torch.testing.assert_close(lse, lses.logsumexp(dim=0))
    assert_rounded(out, outs, lses)


def outputs_of(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Core attention of a plan whose documents lie on the ranks one after the other."""
    others: list[VirtualTransport] = []
    calls, inputs, row = [], [], 0
    for rank in range(plan.world_size):
        transport = VirtualTransport(rank, others, plan.world_size, CPU)
        attention = CoreAttention(transport, select_kernel("cpu"), Buffers(CPU, headroom=0.0))
        attention.reserve(plan_memory(plan, SHAPE))
        calls.append(attention._call(ProgramRun([build_exchange(plan, rank)]), 0, SCALE, {}))
        end = row + int(plan.placement.tokens_per_rank()[rank])
        inputs.append([x[row:end] for x in (q, k, v)])
        row = end
    for call, mine in zip(calls, inputs, strict=True):
        call.start(*mine)
    for call in calls:
        call.compute()
    return torch.cat([call.finish() for call in calls])


def test_parts_of_several_servers_and_tasks() -> None:
    """On servers and on owners: what the kernel gave, merged as if exactly, but for roundings."""
    rng, kernel = np.random.default_rng(2), select_kernel("cpu")
    plan = random_plan(rng, random_lengths(rng, 3 * 320), 3, 320, Mask())
    generator, heads = torch.Generator().manual_seed(0), (SHAPE.heads, SHAPE.kv_heads)
    tokens = int(plan.lengths.sum())
    q, k, v = (
        torch.randn(tokens, n, SHAPE.head_dim, generator=generator).bfloat16()
        for n in (heads[0], heads[1], heads[1])
    )
    out = outputs_of(plan, q, k, v)
    t = plan.tasks
    most = 8
    outs = torch.zeros(most, *q.shape, dtype=q.dtype)
    lses = torch.full((most, *q.shape[:2]), float("-inf"))
    parts = np.zeros(tokens, dtype=np.int64)
    columns = (t.document, t.q_start, t.q_end, t.kv_start, t.kv_end)
    for document, *edges in zip(*(column.tolist() for column in columns), strict=True):
        offset = int(plan.document_offsets[document])
        q_rows, kv_rows = (
            slice(offset + edges[0], offset + edges[1]),
            slice(offset + edges[2], offset + edges[3]),
        )
        cu = [torch.tensor([0, n[1] - n[0]], dtype=torch.int32) for n in (edges[:2], edges[2:])]
        part = kernel.forward(
            *(q[q_rows], k[kv_rows], v[kv_rows]),
            KernelTasks(*cu, edges[1] == edges[3], None, SCALE),
        )
        number = int(parts[q_rows][0])
        outs[number, q_rows], lses[number, q_rows] = part
        parts[q_rows] += 1
    assert parts.max() >= 4
    assert_rounded(out, outs, lses)
