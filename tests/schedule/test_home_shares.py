"""Equal shares of an iteration for ranks that keep their own prompts."""

from __future__ import annotations

import numpy as np
import pytest

from distca.schedule.serving.blocks import BlockPool, PrefixCache, SequenceBlocks
from distca.schedule.serving.home_shares import HomeShares
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import SchedulerOutput
from distca.schedule.serving.scheduler import Scheduler

RANKS, SIZE, NEVER = 3, 4, 1 << 30


def scheduler_of(
    tokens: int = 96, blocks: int = 100, sequences: int = 40, equal: bool = True
) -> tuple[Scheduler, PrefixCache]:
    cache = PrefixCache(BlockPool(RANKS, blocks, SIZE))
    limits = SchedulerConfig(sequences, tokens, SIZE, NEVER, equal_shares=equal)
    return Scheduler(cache, limits), cache


def iterate(scheduler: Scheduler) -> SchedulerOutput | None:
    batch = scheduler.schedule()
    if batch is not None:
        scheduler.advance(batch, {each.sequence: 7 for each in batch.feeds if each.samples})
    return batch


def fed_by_rank(batch: SchedulerOutput) -> list[int]:
    """Tokens of each rank, which owns the block of each."""
    owners = [
        each.ranks[np.arange(each.start, each.start + each.count) // SIZE] for each in batch.feeds
    ]
    return np.bincount(np.concatenate(owners), minlength=RANKS).tolist()


def test_no_rank_is_fed_more_than_its_share() -> None:
    lengths = [200, 30, 90, 10, 60, 120, 5, 44]
    first: dict[bool, list[int]] = {}
    for equal in (True, False):
        scheduler, _ = scheduler_of(equal=equal)
        for number, length in enumerate(lengths):
            scheduler.add(Request(number, [100 + number] * length, 5))
        batch = iterate(scheduler)
        assert batch is not None
        first[equal] = fed_by_rank(batch)
        fed = 0
        while batch is not None:
            counts = fed_by_rank(batch)
            assert not equal or max(counts) <= 32
            # A sequence lies on one rank.
            assert all(len({*each.ranks.tolist()}) == 1 for each in batch.feeds)
            fed += sum(counts)
            batch = iterate(scheduler)
        assert fed == sum(lengths) + 4 * len(lengths)
        assert scheduler.preemptions == 0
    assert first[True] == [32, 32, 32]
    assert first[False] == [96, 0, 0], "the first prompt has all of the iteration"


def test_prompts_go_where_least_is_left() -> None:
    scheduler, _ = scheduler_of(tokens=3000)
    lengths = [400, 100, 90, 120, 10]
    for number, length in enumerate(lengths):
        scheduler.add(Request(number, [100 + number] * length, 1))
    batch = iterate(scheduler)
    assert batch is not None
    homes = {each.sequence: int(each.ranks[0]) for each in batch.feeds}
    assert homes == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1}


def test_a_prefix_is_followed_until_its_rank_has_more_to_do() -> None:
    scheduler, _ = scheduler_of(tokens=3000)
    common = [5] * 100
    scheduler.add(Request(0, common, 1))
    iterate(scheduler)
    for number in range(1, 4):
        scheduler.add(Request(number, [*common, *[100 + number] * 80], 1))
    batch = iterate(scheduler)
    assert batch is not None
    (home,) = {int(each.ranks[0]) for each in batch.feeds}
    assert [each.start for each in batch.feeds] == [100] * 3, "all find the prefix"
    ends = [int(each.ranks[-1]) for each in batch.feeds]
    assert ends[:2] == [home, home], "80 tokens to compute are less than the 100 that are there"
    assert ends[2] != home


def test_answers_go_on_beside_prompts_and_prompts_beside_answers() -> None:
    """More answers on a rank than its share: each is fed, and so is the prompt."""
    scheduler, _ = scheduler_of(tokens=30, blocks=400, sequences=30)
    for number in range(24):
        scheduler.add(Request(number, [100 + number], 40))
    for _ in range(4):
        iterate(scheduler)
    for number in (30, 31, 32):
        scheduler.add(Request(number, [100 + number] * 60, 1))
    seen = 0
    for _ in range(60):
        batch = iterate(scheduler)
        if batch is None:
            break
        decoding = {each.sequence for each in batch.feeds if each.sequence < 24}
        seen += sum(each.count for each in batch.feeds if each.sequence >= 30)
        assert len(decoding) in (24, 0)
        assert max(fed_by_rank(batch)) <= 10
    assert seen == 180


def test_blocks_of_a_full_rank_lie_on_others() -> None:
    scheduler, cache = scheduler_of(blocks=20)
    scheduler.add(Request(0, [1] * 200, 2))
    while iterate(scheduler) is not None:
        pass
    assert scheduler.preemptions == 0
    cache.reset()
    assert [cache.free(rank) for rank in range(RANKS)] == [20] * RANKS


def test_a_rank_without_room_for_the_blocks_that_are_missing_comes_last() -> None:
    """However little it has left to compute; blocks that the cache has of the prompt are there."""
    cache = PrefixCache(BlockPool(RANKS, 30, SIZE))
    limits = SchedulerConfig(40, 300, SIZE, NEVER, equal_shares=True)
    running = []
    for rank, (length, computed, blocks) in enumerate([(97, 96, 24), (70, 20, 20), (80, 20, 10)]):
        each = Request(rank, [100 + rank] * length, 5)
        each.home, each.computed = rank, computed
        each.blocks = SequenceBlocks([cache.take(rank) for _ in range(blocks)])
        running.append(each)
    new = Request(9, [7] * 10 * SIZE, 5)
    new.blocks = SequenceBlocks([cache.take(1) for _ in range(3)])
    assert [cache.available(rank) for rank in range(RANKS)] == [6, 7, 20]
    # Seven blocks are missing. Rank 0, which has least to compute, has room for six of them.
    assert HomeShares(cache, range(RANKS), limits, running).admit(new) == 100
    assert new.home == 1


def test_a_prompt_that_ranks_share_has_the_whole_iteration() -> None:
    """From the first chunk to the last, beside the answers of short ones."""
    cache = PrefixCache(BlockPool(RANKS, 100, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(40, 96, SIZE, threshold=100, equal_shares=True))
    scheduler.add(Request(0, [5] * 20, 9))
    scheduler.add(Request(1, [6] * 200, 1))
    counts = []
    while (batch := iterate(scheduler)) is not None and len(counts) < 3:
        counts.append({each.sequence: each.count for each in batch.feeds})
    assert counts == [{0: 20, 1: 76}, {0: 1, 1: 95}, {0: 1, 1: 29}]


def test_contradicting_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="keep their own prompts"):
        SchedulerConfig(4, 16, SIZE, 0, evens_out=True, equal_shares=True)
