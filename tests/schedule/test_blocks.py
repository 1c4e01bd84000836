"""Blocks of pools: none is lost, none is given twice, and shared ones stay until the last."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distca.schedule.serving.blocks import BlockPool, NoFreeBlocks

RANKS, TOTAL = 2, 6


class Pools(RuleBasedStateMachine):
    """Holders of blocks that take, share and give back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(RANKS, TOTAL, 4)
        self.holders: list[tuple[int, tuple[int, ...]]] = []

    @rule(counts=st.tuples(*[st.integers(0, 3)] * RANKS))
    def allocate(self, counts: tuple[int, ...]) -> None:
        free = [self.pool.free(rank) for rank in range(RANKS)]
        if any(count > n for count, n in zip(counts, free, strict=True)):
            with pytest.raises(NoFreeBlocks, match="are needed"):
                self.pool.allocate(counts)
            assert free == [self.pool.free(rank) for rank in range(RANKS)]
            return
        for rank, blocks in enumerate(self.pool.allocate(counts)):
            assert list(blocks) == sorted(blocks)
            held = {block for other, theirs in self.holders if other == rank for block in theirs}
            assert len(blocks) == counts[rank]
            assert held.isdisjoint(blocks)
            self.holders.append((rank, blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        rank, blocks = data.draw(st.sampled_from(self.holders))
        self.pool.share(rank, blocks)
        self.holders.append((rank, blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(*self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def adds_up(self) -> None:
        for rank in range(RANKS):
            counts = Counter(
                block for holder, blocks in self.holders if holder == rank for block in blocks
            )
            assert self.pool.free(rank) + self.pool.referenced(rank) == TOTAL
            assert self.pool.referenced(rank) == len(counts)
            assert all(self.pool.references(rank, b) == counts[b] for b in range(TOTAL))


Pools.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestPools = Pools.TestCase


def test_a_block_is_not_given_back_twice() -> None:
    pool = BlockPool(1, 3, 4)
    ((block,),) = pool.allocate([1])
    pool.release(0, [block])
    for method in (pool.release, pool.share):
        with pytest.raises(AssertionError, match="nothing references"):
            method(0, [block])
    # The lowest free blocks come first.
    assert pool.allocate([2]) == ((0, 1),)


def test_sizes_are_positive() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(1, 0, 4)
