"""Rows of sequences in a pool: they lie where their tables say, whatever order blocks come in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distca.cost.volume import AttentionShape
from distca.runtime.serving.kv_pool import BlockTables, KVCache

CPU = torch.device("cpu")


def test_rows_are_found_where_they_were_written() -> None:
    """Sequences grow in turn, more of them and longer than the first table has room for."""
    rng, size, count = np.random.default_rng(0), 4, 7
    pool = KVCache(2, 64, size, AttentionShape(4, 2, 8), torch.float32, CPU)
    tables, free = BlockTables(size, CPU), list(rng.permutation(64))
    held: dict[int, list[torch.Tensor]] = {100 + n: [] for n in range(count)}
    for turn in range(8):
        for sequence in held:
            new = int(rng.integers(0, 5))
            rows = np.arange(len(held[sequence]), len(held[sequence]) + new)
            blocks = -(-(len(held[sequence]) + new) // size) - -(-len(held[sequence]) // size)
            tables.append(sequence, [free.pop() for _ in range(blocks)])
            slots = tables.slots(tables.lines([sequence]).repeat(new), rows)
            k = torch.randn(2, new, 2, 8)
            for layer in range(2):
                pool.write(layer, torch.from_numpy(slots), k[layer], -k[layer])
            held[sequence] += k.unbind(1)
        if turn == 5:
            freed = tables.lines([101])
            tables.drop(101)
            del held[101]
            held[200] = []
            assert tables.lines([200]) == freed
    for sequence, expected in held.items():
        n = len(expected)
        slots = torch.from_numpy(tables.slots(tables.lines([sequence]).repeat(n), np.arange(n)))
        for layer in range(2):
            k, v = pool.rows(layer)
            assert torch.equal(k[slots], torch.stack(expected)[:, layer])
            assert torch.equal(v[slots], -torch.stack(expected)[:, layer])
    assert tables.table.dtype == torch.int32
    assert np.array_equal(tables.table.numpy(), tables.host)


def test_a_row_without_a_block_is_refused() -> None:
    tables = BlockTables(4, CPU)
    tables.append(5, [3])
    with pytest.raises(AssertionError, match="has no block"):
        tables.slots(tables.lines([5]), np.array([4]))
