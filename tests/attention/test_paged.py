"""Attention over a pool's blocks, wherever those lie, is attention over the same rows in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distca.attention import KernelTasks, select_kernel
from distca.attention.paged import PagedKeys
from support.attention_cases import SCALE, assert_close

BLOCK = 4
# Queries of each task, rows before its keys, and the rows' end: none, one block, in one run, many.
TASKS = [(1, 0, 1), (2, 0, 0), (0, 0, 5), (3, 0, 30), (1, 0, 4), (1, 0, 61)]
WINDOWED = [(1, 0, 3), (1, 5, 30), (0, 2, 9), (1, 8, 12), (1, 7, 61), (1, 3, 3)]


def pool_of(lines: int, blocks: int, seed: int) -> np.ndarray:
    """A table with runs of neighbouring blocks of all lengths, and blocks in falling order."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(2 * lines * blocks).astype(np.int32)[: lines * blocks]
    table = table.reshape(lines, blocks)
    table[3, 2:7] = 2 * lines * blocks + np.arange(5)
    table[4] = 2 * lines * blocks + 5 + np.arange(blocks)
    return table


@pytest.mark.parametrize("cases", [TASKS, WINDOWED], ids=["whole", "windowed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_kernel(cases, dtype) -> None:
    torch.manual_seed(0)
    kernel, heads, kv_heads, head_dim = select_kernel("cpu"), 4, 2, 8
    host = pool_of(len(cases), 16, 1)
    queries, first, used = np.array(cases).T
    q = torch.randn(int(queries.sum()), heads, head_dim, dtype=dtype)
    k, v = torch.randn(2, (int(host.max()) + 1) * BLOCK, kv_heads, head_dim, dtype=dtype)
    keys = PagedKeys(torch.from_numpy(host), host, first, used, BLOCK)
    cu = [torch.from_numpy(np.append(0, np.cumsum(n)).astype(np.int32)) for n in (queries, used)]
    tasks = KernelTasks(*cu, False, None, SCALE)
    out, lse = kernel.forward_paged(q, k, v, tasks, keys)
    rows = [
        (line[np.arange(a, b) // BLOCK] * BLOCK + np.arange(a, b) % BLOCK)
        for line, a, b in zip(host.astype(np.int64), first, used, strict=True)
    ]
    assert keys.slots(q.device).tolist() == np.concatenate(rows).tolist()
    dense = KernelTasks(
        cu[0], torch.tensor([0, *np.cumsum(used - first)]).int(), False, None, SCALE
    )
    slots = torch.from_numpy(np.concatenate(rows))
    expected_out, expected_lse = kernel.forward(q, k[slots], v[slots], dense)
    tolerance = 3e-6 if dtype == torch.float32 else 3e-2
    seen = torch.repeat_interleave(torch.from_numpy(used > first), torch.from_numpy(queries))
    assert_close(out[seen], expected_out[seen].double(), tolerance)
    assert_close(lse[seen], expected_lse[seen].double(), tolerance)
    assert not out[~seen].any()
    assert (lse[~seen] == float("-inf")).all()
    # Neighbouring blocks are one run: no kernel call more than there are gaps.
    assert [len(runs) for runs in keys.runs][4] == 1
    assert [len(runs) for runs in keys.runs][3] < -(-int(used[3]) // BLOCK)


def test_runs_are_found_once() -> None:
    host = pool_of(len(TASKS), 16, 1)
    _, first, used = np.array(TASKS).T
    keys = PagedKeys(torch.from_numpy(host), host, first, used, BLOCK)
    assert keys.runs is keys.runs


def test_tasks_without_keys_have_no_slots() -> None:
    nothing = np.zeros(2, dtype=np.int64)
    host = np.zeros((2, 3), dtype=np.int32)
    keys = PagedKeys(torch.from_numpy(host), host, nothing, nothing, BLOCK)
    assert keys.slots(torch.device("cpu")).dtype == torch.int64
    assert keys.slots(torch.device("cpu")).tolist() == []
