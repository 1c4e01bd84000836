"""Ranks that share layers send each head once, and engines put the heads of a row together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from distca.prefill.assembly import LayerRows
from distca.prefill.heads import HeadSlices
from distca.prefill.inbox import RowForm

SIZES = [
    (kv_heads, size, workers)
    for kv_heads in (1, 2, 4, 6, 8)
    for size, workers in itertools.product((1, 2, 3, 4, 6, 8, 16), repeat=2)
    if all(not kv_heads % each or not each % kv_heads for each in (size, workers))
]


@pytest.mark.parametrize(("kv_heads", "size", "workers"), SIZES)
def test_each_process_gets_its_heads_once(kv_heads: int, size: int, workers: int) -> None:
    slices = HeadSlices(kv_heads, size, 2 * size)
    of_vllm = HeadSlices(kv_heads, workers, workers)
    for worker in range(workers):
        wanted = of_vllm.held(worker)
        for context in range(2):
            ranks = range(context * size, (context + 1) * size)
            sent = {rank: slices.sent(rank, worker, wanted) for rank in ranks}
            assert sorted(head for heads in sent.values() for head in heads) == list(wanted)
            for rank, heads in sent.items():
                assert set(heads) <= set(slices.held(rank))
            senders = [rank for rank, heads in sent.items() if heads]
            assert [rank for rank in slices.senders(worker, wanted) if rank in ranks] == senders
            if size == workers:
                # Nothing is put together, and each rank has one process.
                assert senders == [ranks.start + worker]


@pytest.mark.parametrize("seed", range(5))
def test_heads_are_put_together_in_whatever_order_they_come(seed: int) -> None:
    """Parts are cut by each rank in its own way, and some come twice."""
    chance = np.random.default_rng(seed)
    count, form = 23, RowForm(range(4, 10), 3, torch.float32)
    keys, values = torch.randn(2, count, *form.shape)
    parts = []
    for heads in (range(4, 6), range(6, 9), range(9, 10)):
        rows = chance.permutation(count)
        cuts = np.sort(chance.choice(np.arange(1, count), 4, replace=False))
        parts += [(np.sort(part), heads) for part in np.split(rows, cuts)]
    parts += [parts[n] for n in chance.integers(len(parts), size=4)]
    taken, given = LayerRows(count, form), np.zeros(count, dtype=np.int64)
    for number in chance.permutation(len(parts)):
        index, heads = parts[number]
        own = slice(heads.start - 4, heads.stop - 4)
        came = [of[index][:, own].clone() for of in (keys, values)]
        whole, *found = taken.take(index, heads, *came)
        for each in came:
            # A slot is another row's as soon as it is free.
            each.fill_(torch.nan)
        for of, rows in zip((keys, values), found, strict=True):
            torch.testing.assert_close(rows, of[whole], atol=0, rtol=0)
        given[whole] += 1
        assert taken.complete == bool(given.all())
    assert (given == 1).all()


def test_whole_rows_are_not_copied() -> None:
    form = RowForm(range(2), 3, torch.float32)
    keys, values = torch.randn(2, 5, *form.shape)
    taken = LayerRows(7, form)
    index, *found = taken.take(np.arange(5), range(2), keys, values)
    assert index.tolist() == [0, 1, 2, 3, 4]
    for rows, sent in zip(found, (keys, values), strict=True):
        assert rows.data_ptr() == sent.data_ptr()
    assert not taken.complete
    taken.take(np.arange(5, 7), range(2), keys[:2], values[:2])
    assert taken.complete
