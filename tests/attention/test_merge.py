"""Merging partial outputs in bfloat16: in float32, and rounded once a merge; adding gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distca.attention import KernelTasks, select_kernel
from distca.attention.merge import Merges, Sums, merge_partial, merge_shared, sum_parts
from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Plan
from distca.runtime import Buffers, CoreAttention, EventCursor, build_exchange
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


def random_parts(parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(parts)
    outs = torch.randn(parts, 300, 4, 16, generator=generator).bfloat16()
    return outs, 3 + 2 * torch.randn(parts, 300, 4, generator=generator)


@pytest.mark.parametrize("parts", range(2, 8))
def test_a_merge_rounds_once(parts: int) -> None:
    outs, lses = random_parts(parts)
    out, lse = outs[0].clone(), lses[0].clone()
    expected = out.clone()
    for part in range(1, parts):
        before = torch.stack([expected, outs[part]]), torch.stack([lse, lses[part]])
        expected = merge_exactly(*before).bfloat16()
        merge_partial(out, lse, slice(0, 300), outs[part], lses[part])
    # Where float64 and float32 lie on different sides of a tie.
    assert (out != expected).double().mean() < 1e-3
    torch.testing.assert_close(lse, lses.logsumexp(dim=0))
    assert_rounded(out, outs, lses)


@pytest.mark.parametrize("parts", range(2, 8))
def test_all_parts_merge_at_once_and_are_rounded_once(parts: int) -> None:
    """Rows have any number of parts, in any order; one in seven of a row's parts has no key."""
    outs, lses = random_parts(parts)
    generator = torch.Generator().manual_seed(1)
    missing = torch.rand(parts, 300, generator=generator) < 1 / 7
    missing[0] &= ~missing[1]
    outs[missing], lses[missing] = 0, float("-inf")
    # The last part of every third row is left out.
    number = torch.arange(parts * 300).view(parts, 300)
    kept = torch.ones(parts, 300, dtype=torch.bool)
    kept[-1, ::3] = parts == 2
    rows = [number[kept[:, row], row] for row in range(300)]
    lengths = torch.tensor([len(each) for each in rows])
    members = torch.cat(rows)
    merges = Merges(
        members,
        torch.arange(len(members)),
        lengths.cumsum(0) - lengths,
        torch.repeat_interleave(torch.arange(300), lengths),
    )
    out = torch.cat([outs.flatten(0, 1), torch.full((300, 4, 16), float("nan")).bfloat16()])
    lse = torch.cat([lses.flatten(0, 1), torch.full((300, 4), float("nan"))])
    taken = lambda shape, dtype: torch.full(shape, 7.0).to(dtype)  # noqa: E731
    merge_shared(out, lse, merges, lambda rows: (out[rows], lse[rows]), taken)
    lses[~kept] = float("-inf")
    exact = merge_exactly(outs, lses)
    torch.testing.assert_close(lse[-300:], lses.logsumexp(dim=0))
    assert (out[-300:] != exact.bfloat16()).double().mean() < 1e-3
    assert torch.equal(out[:-300], outs.flatten(0, 1))


def test_parts_without_any_key_make_a_row_without_any() -> None:
    out, lse = torch.zeros(3, 1, 4), torch.full((3, 1), float("-inf"))
    columns = (torch.tensor(column) for column in ([0, 1], [0, 1], [0], [0, 0]))
    taken = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # noqa: E731
    merge_shared(out, lse, Merges(*columns), lambda rows: (out[rows], lse[rows]), taken)
    assert (out == 0).all()
    assert lse[2] < -1e38


def test_gradients_add_up_in_order_and_are_rounded_once() -> None:
    """Beside a large one, small ones are lost or kept by their order."""
    parts = torch.tensor([10.0, 1.0, 1e8, 5.0, -1e8, 1.0]).view(6, 1, 1)
    order, begins = torch.tensor([0, 1, 2, 4, 5]), torch.tensor([0, 1, 1])
    found = sum_parts(parts, Sums(order, begins))
    assert found.flatten().tolist() == [10.0, 0.0, 2.0 - 1.0]
    into = torch.full((2, 1, 1), 7.0)
    assert sum_parts(parts, Sums(torch.tensor([3, 0]), None), into) is into
    assert into.flatten().tolist() == [5.0, 10.0]
    # Each of the small ones alone would be rounded away.
    small = torch.tensor([1.0, 2**-9, 2**-9, 2**-9]).view(4, 1, 1).bfloat16()
    assert sum_parts(small, Sums(torch.arange(4), torch.tensor([0]))) == 1 + 2**-7


def outputs_of(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Core attention of a plan whose documents lie on the ranks one after the other."""
    others: list[VirtualTransport] = []
    calls, inputs, row = [], [], 0
    for rank in range(plan.world_size):
        transport = VirtualTransport(rank, others, plan.world_size, CPU)
        attention = CoreAttention(transport, select_kernel("cpu"), Buffers(CPU, headroom=0.0))
        attention.reserve(plan_memory(plan, SHAPE))
        calls.append(attention._call(EventCursor([build_exchange(plan, rank)]), 0, SCALE, {}))
        end = row + int(plan.placement.tokens_per_rank()[rank])
        inputs.append([x[row:end] for x in (q, k, v)])
        row = end
    for call, mine in zip(calls, inputs, strict=True):
        call.dispatch(*mine)
    for call in calls:
        call.compute()
    return torch.cat([call.combine() for call in calls])


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
