"""Blocks that move after a prefill: equal shares, few blocks, and none that others hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.cost.model_sizes import MODELS
from distca.schedule.serving.blocks import BlockPool, PrefixCache, SequenceBlocks
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.moves import Mover, join_moves
from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduler import Scheduler
from distca.simulate import CLUSTERS
from distca.simulate.serving import InferenceCosts, simulate_block_moves

SIZE = 4


def filled(cache: PrefixCache, owners: list[int], number: int = 0) -> Request:
    """A sequence whose blocks, all full, lie on these ranks."""
    tokens = [1] * (SIZE * len(owners))
    each = Request(number, tokens, 1)
    each.blocks, each.block_size = SequenceBlocks(map(cache.take, owners)), SIZE
    each.computed = len(tokens)
    return each


@given(
    ranks=st.integers(1, 5),
    owners=st.lists(st.integers(0, 4), min_size=1, max_size=40),
)
def test_shares_are_equal_up_to_a_block(ranks: int, owners: list[int]) -> None:
    cache = PrefixCache(BlockPool(ranks, 50, SIZE))
    each = filled(cache, [owner % ranks for owner in owners])
    before = each.blocks.ranks.tolist()
    moves = Mover(cache, 0, SIZE).even_out([each])
    assert each.blocks.ranks.tolist() == [block.rank for block in each.blocks]
    held = np.bincount(each.blocks.ranks, minlength=ranks)
    assert np.ptp(held) <= 1
    # No more blocks travel than are above an equal share, none twice, and no other is lost.
    surplus = np.bincount(before, minlength=ranks) - held
    assert len(moves) == surplus[surplus > 0].sum()
    assert max(Counter(move.index for move in moves).values(), default=0) <= 1
    assert [cache.referenced(rank) for rank in range(ranks)] == held.tolist()


def test_a_block_that_moves_twice_is_copied_once() -> None:
    """From where its rows are: they come to the place between only with those of all others."""
    cache = PrefixCache(BlockPool(3, 4, SIZE))
    each = filled(cache, [0] * 4)
    first = each.blocks[3]
    mover = Mover(cache, 1, SIZE)
    moves = mover.even_out([each])
    assert [move.index for move in moves] == [3, 2]
    moves += mover.make_room([each], 4)
    assert [move.index for move in moves] == [3, 2, 0, 1, 2, 3]
    joined = join_moves(moves)
    assert [(move.index, move.source.rank, move.to.rank) for move in joined] == [
        *((0, 0, 2), (1, 0, 2), (2, 0, 2), (3, 0, 2))
    ]
    assert joined[-1].source == first
    assert [move.to for move in joined] == [*each.blocks]


def test_what_others_hold_stays_and_full_ranks_take_nothing() -> None:
    cache = PrefixCache(BlockPool(2, 8, SIZE))
    each = filled(cache, [0] * 6)
    shared = [cache.pool.share(0, [block.number]) for block in each.blocks[3:]]
    assert len(shared) == 3
    assert {move.index for move in Mover(cache, 0, SIZE).even_out([each])} == {0, 1, 2}
    tight = PrefixCache(BlockPool(2, 8, SIZE))
    filled(tight, [1] * 7, number=1)
    assert len(Mover(tight, 0, SIZE).even_out([filled(tight, [0] * 6)])) == 1


def test_a_scheduler_evens_out_once_a_prompt_is_computed() -> None:
    cache = PrefixCache(BlockPool(2, 20, SIZE))
    chain = Chain(2, (0.75, 0.25))
    scheduler = Scheduler(
        cache, SchedulerConfig(4, 64, SIZE, 0, chain=chain, evens_out=True), b"salt"
    )
    scheduler.add(Request(0, list(range(32)), 4))
    moved = []
    for _ in range(4):
        batch = scheduler.schedule()
        assert batch is not None
        moved.append(len(batch.moves))
        scheduler.advance(batch, {0: 1})
    # Six of eight blocks are on a rank of the chain, two of which go.
    assert moved == [0, 2, 0, 0]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_simulated_bytes_are_those_of_the_blocks(tensor_parallel: int) -> None:
    cache = PrefixCache(BlockPool(2, 200, 16))
    moves = Mover(cache, 0, 16).even_out([filled(cache, [1] * 75 + [0] * 25)])
    costs = InferenceCosts(MODELS["llama-8b"], CLUSTERS["dgx-h100"], tensor_parallel)
    seconds, nbytes = simulate_block_moves(moves, 16, 2, costs)
    # Half of the tokens' difference, keys and values of 8 heads of 128 in 16 bits.
    assert nbytes == 400 * 2 * 8 * 128 * 2 * 32
    assert seconds > nbytes / tensor_parallel / costs.cluster.node_bytes_per_second
