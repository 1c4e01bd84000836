"""Answers that share a prompt, and blocks that move: followed through the scheduler at random."""

from __future__ import annotations

import pytest

from distca.schedule.serving.blocks import BlockPool, PrefixCache, extend_digests
from distca.schedule.serving.cdsp import ImprovementRates, Search
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduler import MOST_SCORED, Scheduler
from support.scheduler_walks import ANY_GROUPS, SIZE, TIMES, Walk

GROWING = GrowingGroups(Search(TIMES, smallest_chunk=SIZE))


@pytest.mark.parametrize(
    ("ranks", "servers", "blocks", "enabled", "growing", "longest"),
    [
        (2, 0, 6, True, None, 36),
        (2, 0, 6, False, None, 36),
        (4, 0, 7, False, None, 40),
        (3, 1, 5, True, None, 24),
        (3, 2, 4, False, None, 24),
        # With the answer, all that the pools hold.
        (2, 1, 4, True, None, 20),
        (2, 1, 4, False, None, 20),
        (3, 2, 4, True, None, 36),
        (3, 2, 4, False, None, 36),
        (2, 0, 14, True, ANY_GROUPS, 40),
        (4, 0, 7, False, ANY_GROUPS, 40),
        (5, 1, 6, True, ANY_GROUPS, 24),
        (3, 1, 4, True, ANY_GROUPS, 36),
        (4, 2, 4, False, ANY_GROUPS, 36),
    ],
)
def test_no_block_is_lost_or_mixed_up(
    ranks: int,
    servers: int,
    blocks: int,
    enabled: bool,
    growing: GrowingGroups | None,
    longest: int,
    full: bool,
) -> None:
    moved = 0
    for seed in range(200 if full else 20):
        walk = Walk(seed, ranks, servers, blocks, enabled, growing, longest)
        for _ in range(40):
            if walk.chance.random() < 0.3:
                walk.arrive()
            walk.iterate()
        for _ in range(2000):
            if not walk.iterate():
                break
        assert not walk.scheduler.running + walk.scheduler.waiting
        assert all(walk.cache.available(rank) == blocks for rank in range(ranks))
        walk.cache.reset()
        assert all(walk.cache.free(rank) == blocks for rank in range(ranks))
        moved += walk.moves
        assert growing or (walk.moves > 0) == (servers > 0)
    assert moved or not growing


def test_groups_are_smaller_where_many_prompts_arrive() -> None:
    """By a table of improvement rates: here one that leaves groups one rank from 1 a second on."""
    rates = ImprovementRates({0.0: 0.0, 1.0: (0.0, 1)})
    growing = GrowingGroups(Search(TIMES, smallest_chunk=SIZE), rates=rates)
    for each_second, most in ((1, 2), (100, 1)):
        cache = PrefixCache(BlockPool(2, 100, SIZE))
        scheduler = Scheduler(cache, SchedulerConfig(1, 400, SIZE, 9, growing=growing), b"model")
        for number in range(each_second):
            scheduler.add(Request(number, [number] * 40, 1, arrived=7.0 + number / each_second))
        begun = scheduler.schedule()
        assert begun is not None
        (feed,) = begun.feeds
        assert len({block.rank for block in feed.new_blocks}) == most, each_second


def test_a_prompt_begins_on_ranks_that_are_free_and_goes_on_with_more() -> None:
    cache = PrefixCache(BlockPool(2, 40, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(4, 40, SIZE, 9, growing=GROWING), b"model")
    scheduler.add(Request(0, [1] * 9, 2))
    scheduler.add(Request(1, [2] * 40, 9))
    ranks: dict[int, list[list[int]]] = {0: [], 1: []}
    moves = []
    while (batch := scheduler.schedule()) is not None:
        for feed in batch.feeds:
            ranks[feed.sequence].append([block.rank for block in feed.new_blocks])
        moves.append([(each.sequence, each.index, each.to.rank) for each in batch.moves])
        scheduler.advance(batch, {feed.sequence: 3 for feed in batch.feeds if feed.samples})
    # The short one has a rank of its own; the long one has the other, until both are free.
    assert ranks[0] == [[0] * 3, []]
    # Both have its decoded tokens, too.
    decoded = [[1], [], [], [], [0], [], [], []]
    assert ranks[1] == [[1] * 2, [0, 0, 1, 1, 1, 1, 0, 0], *decoded]
    # Blocks of the first chunk go to the new member first.
    assert moves == [[], [(1, 1, 0)], *[[]] * len(decoded)]


def test_ranks_are_busy_with_what_is_left_of_prompts_alone() -> None:
    """A prompt of which a part is computed takes the seconds of the rest, behind that part."""
    told: list[tuple[float, ...]] = []

    class Told(GrowingGroups):
        def plan(self, queued, *others):
            told.append((*queued,))
            return super().plan(queued, *others)

    growing = Told(Search(TIMES, most_ranks=1, smallest_chunk=SIZE))
    cache = PrefixCache(BlockPool(2, 40, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(4, 32, SIZE, 9, growing=growing), b"model")
    scheduler.add(Request(0, [1] * 40, 2))
    assert iterate(scheduler) == [(0, 0, 16)]
    scheduler.add(Request(1, [2] * 20, 2))
    assert iterate(scheduler) == [(0, 16, 16), (1, 0, 16)]
    left = growing.seconds(1, 16, 24)
    assert left > 0
    assert [sorted(each) for each in told] == [[0.0, 0.0], [0.0, left]]


def test_groups_compute_side_by_side() -> None:
    """A rank is fed its share of an iteration's tokens, whoever came first."""
    of_one = GrowingGroups(Search(TIMES, most_ranks=1, smallest_chunk=SIZE))
    cache = PrefixCache(BlockPool(2, 40, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(4, 16, SIZE, 9, growing=of_one), b"model")
    for number in range(3):
        scheduler.add(Request(number, [number] * 20, 2))
    assert iterate(scheduler) == [(0, 0, 8), (1, 0, 8)]
    assert iterate(scheduler) == [(0, 8, 8), (1, 8, 8)]
    # The third one gets what its rank is not fed by others.
    assert iterate(scheduler) == [(0, 16, 4), (1, 16, 4), (2, 0, 4)]
    assert iterate(scheduler) == [(0, 20, 1), (1, 20, 1), (2, 4, 8)]
    # A group of two is fed the shares of both, and an iteration feeds a token at least.
    for most, fed in ((16, 16), (2, 2), (1, 1)):
        cache = PrefixCache(BlockPool(2, 40, SIZE))
        scheduler = Scheduler(cache, SchedulerConfig(1, most, SIZE, 9, growing=GROWING), b"model")
        scheduler.add(Request(0, [1] * 60, 2))
        assert iterate(scheduler) == [(0, 0, fed)]


def test_a_follower_goes_on_where_its_prompt_is() -> None:
    """Answers to a prompt that more ranks hold than the largest group has."""
    cache = PrefixCache(BlockPool(3, 40, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(4, 99, SIZE, 9, growing=GROWING), b"model")
    digests = extend_digests([], [7] * 24, SIZE, b"model")
    blocks = [cache.take(number % 3) for number in range(6)]
    for block, digest in zip(blocks, digests, strict=True):
        cache.keep(block, digest)
    cache.release(blocks)
    scheduler.add(Request(0, [7] * 25, 9))
    feeds = []
    while (batch := scheduler.schedule()) is not None:
        feeds += batch.feeds
        scheduler.advance(batch, {0: 3})
    assert (feeds[0].start, feeds[0].count) == (24, 1)
    assert {block.rank for feed in feeds for block in feed.new_blocks} <= {0, 1, 2}
    with pytest.raises(ValueError, match="leave the chain"):
        SchedulerConfig(4, 99, SIZE, 9, growing=GROWING, evens_out=True)
    with pytest.raises(ValueError, match="no strategy 'fast'"):
        GrowingGroups(Search(TIMES), "fast")
    with pytest.raises(ValueError, match="leave out tokens_per_rank"):
        GrowingGroups(Search(TIMES, tokens_per_rank=9))


def test_a_prompt_whose_beginning_is_cached_goes_on_behind_it() -> None:
    """On the ranks that hold it, and maybe more, where nothing else runs."""
    cache = PrefixCache(BlockPool(4, 40, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(4, 99, SIZE, 9, growing=GROWING), b"model")
    for number, tokens, start in ((0, 40, 0), (1, 80, 40)):
        scheduler.add(Request(number, [7] * tokens, 1))
        batch = scheduler.schedule()
        assert batch is not None
        assert batch.feeds[0].start == start
        while batch is not None:
            scheduler.advance(batch, {number: 3})
            batch = scheduler.schedule()


def test_one_answer_computes_the_prompt_of_all() -> None:
    cache = PrefixCache(BlockPool(2, 40, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(8, 64, SIZE, 9, prefix_caching=False))
    for _ in range(2):
        for number in (1, 2, 0):
            scheduler.add(Request(number, [5] * 10, 3, leader=None if number == 0 else 0))
        scheduler.add(Request(3, [5] * 10, 3))
        fed = []
        while (batch := scheduler.schedule()) is not None:
            fed.append([(feed.sequence, feed.start, feed.count) for feed in batch.feeds])
            scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
        # Another request's is no answer to the same: without a cache it computes all. So do those
        # that ask for the same later.
        assert fed[0] == [(0, 0, 10), (3, 0, 10)]
        assert fed[1] == [(0, 10, 1), (3, 10, 1), (1, 8, 2), (2, 8, 2)]
        assert all(cache.available(rank) == 40 for rank in range(2))


Fed = list[tuple[int, int, int]]
"""What iterations feed: sequence, first position and tokens."""


def iterate(scheduler: Scheduler) -> Fed:
    """Runs an iteration, if there is one."""
    batch = scheduler.schedule()
    if batch is None:
        return []
    scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    return [(feed.sequence, feed.start, feed.count) for feed in batch.feeds]


def to_the_end(scheduler: Scheduler) -> Fed:
    """Runs iterations until there is none."""
    fed: Fed = []
    while more := iterate(scheduler):
        fed += more
    assert scheduler.running == scheduler.waiting == 0
    return fed


def family(
    answers: int, sequences: int = 8, enabled: bool = False
) -> tuple[Scheduler, PrefixCache]:
    """Answers to a prompt, of which 0 leads, and a sequence 9 that waits behind them."""
    cache = PrefixCache(BlockPool(1, 40, SIZE))
    limits = SchedulerConfig(sequences, 8, SIZE, 9, prefix_caching=enabled)
    scheduler = Scheduler(cache, limits)
    for number in (*range(1, answers), 0):
        scheduler.add(Request(number, [5] * 22, 3, leader=None if number == 0 else 0))
    scheduler.add(Request(9, [6] * 3, 1))
    return scheduler, cache


@pytest.mark.parametrize("answers", [2, 4])
@pytest.mark.parametrize("when", ["it waits", "it runs", "it is fed"])
def test_a_leader_that_is_aborted_alone_hands_over(when: str, answers: int) -> None:
    """Its first follower goes on, before whoever else waits, with what is computed."""
    scheduler, cache = family(answers)
    if when != "it waits":
        assert iterate(scheduler) == [(0, 0, 8)]
    batch = scheduler.schedule() if when == "it is fed" else None
    assert scheduler.abort(0)
    assert not scheduler.abort(0)
    if batch is not None:
        assert cache.referenced(0)
        assert scheduler.advance(batch, {}) == []
    assert not cache.referenced(0)
    assert scheduler.waiting == answers
    begin = 8 if when != "it waits" else 0
    assert cache.cached(0) == (16 if when == "it is fed" else begin) // SIZE or True
    fed = to_the_end(scheduler)
    assert fed[0] == (1, begin, 8)
    assert {each for each, _, _ in fed} == {*range(1, answers), 9}
    for follower in range(2, answers):
        assert next(each for each in fed if each[0] == follower)[1:] == (20, 2)
    assert cache.available(0) == 40


def test_followers_go_on_in_their_order_before_others() -> None:
    scheduler, cache = family(4, sequences=2)
    scheduler.add(Request(8, [7] * 3, 1))
    fed = to_the_end(scheduler)
    assert [*dict.fromkeys(each for each, _, _ in fed)] == [0, 9, 1, 2, 3, 8]
    assert cache.available(0) == 40


def test_what_a_prompt_computes_that_nobody_waits_for_any_more_is_not_kept() -> None:
    """From the last follower's abort on, and no sooner."""
    scheduler, cache = family(3)
    iterate(scheduler)
    assert scheduler.abort(1)
    iterate(scheduler)
    assert scheduler.waiting == 2
    assert scheduler.abort(2)
    assert scheduler.waiting == 1
    assert not scheduler.abort(1)
    assert {each for each, _, _ in to_the_end(scheduler)} == {0, 9}
    assert cache.cached(0) == 4
    scheduler, cache = family(3)
    iterate(scheduler)
    assert scheduler.abort(1)
    assert (2, 20, 2) in to_the_end(scheduler), "one waited still"


def test_with_the_cache_a_prompt_stays_that_nobody_waits_for() -> None:
    scheduler, cache = family(2, enabled=True)
    iterate(scheduler)
    assert scheduler.abort(1)
    to_the_end(scheduler)
    assert cache.cached(0) == 6
    scheduler.add(Request(7, [5] * 22, 1))
    assert to_the_end(scheduler) == [(7, 20, 2)]


def test_followers_that_are_aborted_before_they_run_need_no_blocks() -> None:
    scheduler, cache = family(3, sequences=1)
    for _ in range(3):
        iterate(scheduler)
    assert (scheduler.waiting, scheduler.running) == (3, 1)
    for number in range(3):
        assert scheduler.abort(number)
        assert cache.cached(0) == 5
    assert cache.available(0) == 40
    assert to_the_end(scheduler) == [(9, 0, 3)]


def test_blocks_of_a_shared_prompt_are_found_where_they_moved() -> None:
    """Though the cache is off: a follower waits for them."""
    cache = PrefixCache(BlockPool(2, 12, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(8, 8, SIZE, 9, servers=1, prefix_caching=False))
    scheduler.add(Request(1, [5] * 22, 1, leader=0))
    scheduler.add(Request(0, [5] * 22, 1))
    moves, first = [], {}
    while (batch := scheduler.schedule()) is not None:
        moves += [(move.sequence, move.index, move.to.rank) for move in batch.moves]
        for feed in batch.feeds:
            first.setdefault(feed.sequence, feed)
        scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    assert moves == [(0, 1, 1), (0, 3, 1)]
    assert (first[1].start, first[1].count) == (20, 2)
    assert [block.rank for block in first[1].new_blocks] == [0, 1, 0, 1, 0, 0]
    assert [cache.available(rank) for rank in range(2)] == [12, 12]


def test_blocks_that_are_computed_again_move_again() -> None:
    """A sequence that gave up its blocks has none that are where they should be."""
    cache = PrefixCache(BlockPool(2, 7, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(8, 9, SIZE, 9, servers=1, prefix_caching=False))
    scheduler.add(Request(1, [6] * 4, 32))
    iterate(scheduler)
    scheduler.add(Request(0, [5] * 40, 9))
    moved: dict[bool, set[int]] = {False: set(), True: set()}
    while (batch := scheduler.schedule()) is not None:
        again = scheduler.preemptions > 0
        moved[again] |= {move.index for move in batch.moves if move.sequence == 0}
        scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    assert moved == {False: {1, 3, 5, 7, 9}, True: {1, 3, 5, 7, 9}}


def test_blocks_make_room_before_a_sequence_gives_up_its_own() -> None:
    """Even those whose stripes are of the rank that computes."""
    cache = PrefixCache(BlockPool(2, 3, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(8, 64, 16 * SIZE, 9, servers=1))
    scheduler.add(Request(0, [5] * 20, 5))
    moved = []
    for _ in range(8):
        batch = scheduler.schedule()
        if batch is not None:
            moved += [move.index for move in batch.moves]
            scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    assert scheduler.running == scheduler.waiting == scheduler.preemptions == 0
    assert moved == [0, 1, 2]


@pytest.mark.parametrize("enabled", [True, False])
def test_blocks_that_are_found_make_room_for_the_rest_of_their_sequence(enabled: bool) -> None:
    """They fill the rank that computes, and nobody runs who could give up blocks."""
    cache = PrefixCache(BlockPool(2, 4, SIZE))
    limits = SchedulerConfig(4, 16, SIZE, 9, servers=1, prefix_caching=enabled)
    scheduler = Scheduler(cache, limits)
    for number in (1, 2, 0):
        scheduler.add(Request(number, [5] * 18, 1, leader=None if number == 0 else 0))
    assert iterate(scheduler) == [(0, 0, 16)]
    # The first of those that wait computes what is left, for itself and for the other.
    assert scheduler.abort(0)
    assert cache.available(0) == cache.cached(0) == 4
    assert to_the_end(scheduler) == [(1, 16, 2), (2, 16, 2)]


def test_a_prompt_to_hold_has_room_where_ranks_compute() -> None:
    """The others get blocks only once these are full."""
    limits = SchedulerConfig(4, 16, SIZE, 9, servers=1)
    scheduler = Scheduler(PrefixCache(BlockPool(2, 4, SIZE)), limits)
    with pytest.raises(ValueError, match="17 tokens need more than the 16"):
        scheduler.add(Request(0, [5] * 17, 0))
    scheduler.add(Request(0, [5] * 17, 1))
    scheduler.add(Request(1, [5] * 16, 0))
    while iterate(scheduler):
        pass
    assert (scheduler.held, scheduler.running, scheduler.waiting) == (1, 0, 0)


def test_scored_prompts_are_computed_whole_and_in_small_chunks() -> None:
    cache = PrefixCache(BlockPool(1, 400, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(8, 4 * MOST_SCORED, SIZE, 9))
    counts = []
    for number in range(2):
        scheduler.add(Request(number, [5] * (MOST_SCORED + 9), 1, scored=number == 1))
        while (batch := scheduler.schedule()) is not None:
            counts += [(feed.start, feed.count) for feed in batch.feeds]
            scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    assert counts == [(0, MOST_SCORED + 9), (0, MOST_SCORED), (MOST_SCORED, 9)]


def test_scored_prompts_share_the_logits_of_an_iteration() -> None:
    """Whether they are admitted or run already."""
    cache = PrefixCache(BlockPool(1, 400, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(8, 4 * MOST_SCORED, SIZE, 9))
    for number in range(3):
        scheduler.add(Request(number, [number] * (MOST_SCORED - 50), 1, scored=number < 2))
    fed = []
    while (batch := scheduler.schedule()) is not None:
        fed.append([(feed.sequence, feed.start, feed.count) for feed in batch.feeds])
        scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    first, rest = MOST_SCORED - 50, MOST_SCORED - 100
    assert fed == [[(0, 0, first), (1, 0, 50), (2, 0, first)], [(1, 50, rest)]]
