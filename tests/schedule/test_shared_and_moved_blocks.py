"""Answers that share a prompt, and blocks that move: followed through the scheduler at random."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.cdsp import Chunk, Coefficients, PrefillModel, PrefillPlan, Search
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.prefix_cache import Block, PrefixCache, extend_digests
from distca.schedule.serving.scheduled import SchedulerOutput
from distca.schedule.serving.scheduler import MOST_SCORED, Scheduler

SIZE = 4
# A rank is as fast as two for 10 tokens, and slower for more.
TIMES = PrefillModel(
    "any", "any", {n: Coefficients(5.0 * (n - 1), 1 / n, 0.0, 0.0) for n in (1, 2, 4)}
)
GROWING = GrowingGroups(Search(TIMES, smallest_chunk=SIZE))


class AnyGroups(GrowingGroups):
    """Any chunks on any nested groups, of any number of ranks."""

    def plan(
        self, queued: Sequence[float], tokens: int, cached: int, holders: Ranks
    ) -> PrefillPlan:
        chance = random.Random(f"{queued} {tokens} {cached} {sorted(holders)}")
        if chance.random() < 0.3:
            tokens, cached, holders = tokens + cached, 0, frozenset()
        others = [rank for rank in range(len(queued)) if rank not in holders]
        chance.shuffle(others)
        chunks = []
        while tokens:
            more = chance.randint(not holders and not chunks, min(len(others), 2))
            holders, others = holders | {*others[:more]}, others[more:]
            count = chance.randint(1, tokens)
            chunks.append(Chunk(cached, count, holders, 0.0, 0.0))
            cached, tokens = cached + count, tokens - count
        return PrefillPlan(tuple(chunks))


ANY_GROUPS = AnyGroups(Search(TIMES))


class Walk:
    """Sequences that come, run, end and are aborted; what each block's rows hold is followed.

    Args:
        seed: seed of the walk.
        ranks: ranks that there are.
        servers: those that have no weights.
        blocks: blocks of a rank.
        enabled: whether the prefix cache is on.
        growing: how prompts are given ranks of their own; None: they are not.
    """

    def __init__(
        self,
        seed: int,
        ranks: int,
        servers: int,
        blocks: int,
        enabled: bool,
        growing: GrowingGroups | None = None,
    ) -> None:
        self.chance, self.ranks, self.servers, self.blocks = (
            random.Random(seed),
            ranks,
            servers,
            blocks,
        )
        self.cache = PrefixCache(BlockPool(ranks, blocks, SIZE), enabled)
        limits = SchedulerConfig(4, 16, SIZE, 9, servers, growing=growing)
        self.growing = growing
        self.scheduler = Scheduler(self.cache, limits, b"model")
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[Block]] = {}
        self.rows: dict[tuple[Block, int], tuple[int, ...]] = {}
        self.number = self.moves = 0

    def arrive(self) -> None:
        """Answers to a prompt, of which one computes it and the others follow."""
        most = 24 if self.servers else min(40, self.ranks * self.blocks * SIZE - 12)
        length, alike = self.chance.randint(1, most), self.chance.choice([0, 6, 20])
        choices = self.chance.choice([1, 1, 3])
        prompt = [7] * min(alike, length) + [100 + self.number] * max(length - alike, 0)
        leader = self.number
        numbers = [*range(leader + 1, leader + choices), leader]
        for each in numbers:
            new, scored = self.chance.randint(1, 12), each == leader and self.chance.random() < 0.3
            given = None if each == leader else leader
            self.scheduler.add(each, prompt, new, leader=given, scored=scored)
            self.tokens[each] = list(prompt)
        self.number += choices

    def abort(self, batch: SchedulerOutput | None) -> None:
        if self.tokens and self.chance.random() < 0.3:
            number = self.chance.choice(sorted(self.tokens))
            assert self.scheduler.abort(number)
            assert not self.scheduler.abort(number)
            del self.tokens[number]
            if batch is None or number not in {feed.sequence for feed in batch.feeds}:
                self.tables.pop(number, None)

    def iterate(self) -> bool:
        """Runs an iteration; returns whether there was one."""
        batch = self.scheduler.schedule()
        if batch is None:
            assert not self.tokens
            return False
        copied = {
            (move.to, row): self.rows[move.source, row]
            for move in batch.moves
            for row in range(SIZE)
        }
        self.rows |= copied
        self.moves += len(batch.moves)
        for number in batch.preempted:
            del self.tables[number]
        for feed in batch.feeds:
            if feed.admitted:
                self.tables[feed.sequence] = []
            self.tables[feed.sequence] += feed.new_blocks
            assert all(block.rank < self.ranks - self.servers for block in feed.new_blocks[-1:])
        for move in batch.moves:
            if self.growing is None:
                assert move.to.rank >= self.ranks - self.servers > move.source.rank
            if move.sequence in self.tables:
                assert self.tables[move.sequence][move.index] == move.source
                self.tables[move.sequence][move.index] = move.to
        for feed in batch.feeds:
            table, tokens, end = self.tables[feed.sequence], self.tokens[feed.sequence], feed.start
            for position in range(feed.start):
                assert self.rows[table[position // SIZE], position % SIZE] == (
                    *tokens[: position + 1],
                )
            end += feed.count
            assert len(table) == -(-end // SIZE)
            for position in range(feed.start, end):
                self.rows[table[position // SIZE], position % SIZE] = (*tokens[: position + 1],)
        self.check()
        self.abort(batch)
        chosen = {feed.sequence: self.chance.randint(0, 2) for feed in batch.feeds if feed.samples}
        advances = self.scheduler.advance(batch, chosen)
        for each in advances:
            self.tokens[each.sequence].append(each.token)
            if each.finish:
                del self.tokens[each.sequence]
        for number in [each for each in self.tables if each not in self.tokens]:
            del self.tables[number]
        self.check()
        self.abort(None)
        return True

    def check(self) -> None:
        held = Counter(block for table in self.tables.values() for block in table)
        for rank in range(self.ranks):
            cache = self.cache
            assert cache.free(rank) + cache.referenced(rank) + cache.cached(rank) == self.blocks
            assert cache.referenced(rank) == sum(block.rank == rank for block in held)


@pytest.mark.parametrize(
    ("ranks", "servers", "blocks", "enabled", "growing"),
    [
        (2, 0, 6, True, None),
        (2, 0, 6, False, None),
        (4, 0, 7, False, None),
        (3, 1, 5, True, None),
        (3, 2, 4, False, None),
        (2, 0, 14, True, ANY_GROUPS),
        (4, 0, 7, False, ANY_GROUPS),
        (5, 1, 6, True, ANY_GROUPS),
    ],
)
def test_no_block_is_lost_or_mixed_up(
    ranks: int,
    servers: int,
    blocks: int,
    enabled: bool,
    growing: GrowingGroups | None,
    full: bool,
) -> None:
    moved = 0
    for seed in range(200 if full else 20):
        walk = Walk(seed, ranks, servers, blocks, enabled, growing)
        for _ in range(40):
            if walk.chance.random() < 0.3:
                walk.arrive()
            walk.iterate()
        for _ in range(2000):
            if not walk.iterate():
                break
        assert not walk.scheduler.running + walk.scheduler.waiting
        if not enabled:
            assert all(walk.cache.free(rank) == blocks for rank in range(ranks))
        walk.cache.reset()
        assert all(walk.cache.free(rank) == blocks for rank in range(ranks))
        moved += walk.moves
        assert growing or (walk.moves > 0) == (servers > 0)
    assert moved or not growing


def test_a_prompt_begins_on_ranks_that_are_free_and_goes_on_with_more() -> None:
    cache = PrefixCache(BlockPool(2, 40, SIZE), enabled=False)
    scheduler = Scheduler(cache, SchedulerConfig(4, 40, SIZE, 9, growing=GROWING), b"model")
    scheduler.add(0, [1] * 9, 2)
    scheduler.add(1, [2] * 40, 5)
    ranks: dict[int, list[list[int]]] = {0: [], 1: []}
    moves = []
    while (batch := scheduler.schedule()) is not None:
        for feed in batch.feeds:
            ranks[feed.sequence].append([block.rank for block in feed.new_blocks])
        moves.append([(each.sequence, each.index, each.to.rank) for each in batch.moves])
        scheduler.advance(batch, {feed.sequence: 3 for feed in batch.feeds if feed.samples})
    # The short one has a rank of its own; the long one has the other, until both are free.
    assert ranks[0] == [[0] * 3, []]
    assert ranks[1] == [[1] * 2, [0, 0, 1, 1, 1, 1, 0, 0], [1], [], [], []]
    # Blocks of the first chunk go to the new member first.
    assert moves == [[], [(1, 1, 0)], [], [], [], []]


def test_a_follower_goes_on_where_its_prompt_is() -> None:
    """Answers to a prompt that more ranks hold than the largest group has."""
    cache = PrefixCache(BlockPool(3, 40, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(4, 99, SIZE, 9, growing=GROWING), b"model")
    digests = extend_digests([], [7] * 24, SIZE, b"model")
    blocks = [cache.take(number % 3) for number in range(6)]
    for block, digest in zip(blocks, digests, strict=True):
        cache.keep(block, digest)
    cache.release(blocks)
    scheduler.add(0, [7] * 25, 9)
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


def test_one_answer_computes_the_prompt_of_all() -> None:
    cache = PrefixCache(BlockPool(2, 40, SIZE), enabled=False)
    scheduler = Scheduler(cache, SchedulerConfig(8, 64, SIZE, 9))
    for number in (1, 2, 0):
        scheduler.add(number, [5] * 10, 3, leader=None if number == 0 else 0)
    scheduler.add(3, [5] * 10, 3)
    fed = []
    while (batch := scheduler.schedule()) is not None:
        fed.append([(feed.sequence, feed.start, feed.count) for feed in batch.feeds])
        scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    # Another request's is no answer to the same: without a cache it computes all.
    assert fed[0] == [(0, 0, 10), (3, 0, 10)]
    assert fed[1] == [(0, 10, 1), (3, 10, 1), (1, 8, 2), (2, 8, 2)]
    assert all(cache.free(rank) == 40 for rank in range(2))


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
    cache = PrefixCache(BlockPool(1, 40, SIZE), enabled)
    scheduler = Scheduler(cache, SchedulerConfig(sequences, 8, SIZE, 9))
    for number in (*range(1, answers), 0):
        scheduler.add(number, [5] * 22, 3, leader=None if number == 0 else 0)
    scheduler.add(9, [6] * 3, 1)
    return scheduler, cache


@pytest.mark.parametrize("answers", [2, 4])
@pytest.mark.parametrize("when", ["it waits", "it runs", "it is fed"])
def test_a_leader_that_is_aborted_alone_hands_over(when: str, answers: int) -> None:
    """Its first follower goes on, before whoever else waits, with what is computed if others need
    that, too; what nobody waits for is given back."""
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
    begin = 8 if when != "it waits" and answers > 2 else 0
    assert cache.cached(0) == begin // SIZE
    fed = to_the_end(scheduler)
    assert fed[0] == (1, begin, 8)
    assert {each for each, _, _ in fed} == {*range(1, answers), 9}
    for follower in range(2, answers):
        assert next(each for each in fed if each[0] == follower)[1:] == (20, 2)
    assert cache.free(0) == 40


def test_followers_go_on_in_their_order_before_others() -> None:
    scheduler, cache = family(4, sequences=2)
    scheduler.add(8, [7] * 3, 1)
    fed = to_the_end(scheduler)
    assert [*dict.fromkeys(each for each, _, _ in fed)] == [0, 9, 1, 2, 3, 8]
    assert cache.free(0) == 40


def test_a_prompt_that_nobody_waits_for_any_more_is_not_kept() -> None:
    """With the last follower's abort, and no sooner, be the leader running or waiting again."""
    scheduler, cache = family(3)
    iterate(scheduler)
    assert scheduler.abort(1)
    iterate(scheduler)
    assert scheduler.waiting == 2
    assert scheduler.abort(2)
    assert scheduler.waiting == 1
    # What the leader computes from now on nobody waits for.
    assert not scheduler.abort(1)
    assert {each for each, _, _ in to_the_end(scheduler)} == {0, 9}
    assert cache.free(0) == 40
    scheduler, cache = family(3)
    iterate(scheduler)
    assert scheduler.abort(1)
    assert (2, 20, 2) in to_the_end(scheduler), "one waited still"
    # An older sequence takes the leader's blocks, which the cache keeps for its follower.
    cache = PrefixCache(BlockPool(1, 8, SIZE), enabled=False)
    scheduler = Scheduler(cache, SchedulerConfig(2, 6, SIZE, 99))
    scheduler.add(9, [6] * 4, 20)
    iterate(scheduler)
    scheduler.add(1, [5] * 28, 1, leader=0)
    scheduler.add(0, [5] * 28, 1)
    while not scheduler.preemptions:
        iterate(scheduler)
    assert (scheduler.running, scheduler.waiting) == (1, 2)
    assert cache.cached(0)
    assert scheduler.abort(1)
    assert not cache.cached(0)
    to_the_end(scheduler)
    assert cache.free(0) == 8


def test_with_the_cache_a_prompt_stays_that_nobody_waits_for() -> None:
    scheduler, cache = family(2, enabled=True)
    iterate(scheduler)
    assert scheduler.abort(1)
    to_the_end(scheduler)
    assert cache.cached(0) == 6
    scheduler.add(7, [5] * 22, 1)
    assert to_the_end(scheduler) == [(7, 20, 2)]


def test_followers_that_are_aborted_before_they_run_need_no_blocks() -> None:
    """Nor do those that are admitted, and then the last of them lets go of the prompt."""
    scheduler, cache = family(3, sequences=1)
    while scheduler.waiting < 3 or scheduler.running == 0 or scheduler.computed(0) < 22:
        iterate(scheduler)
    blocks = 6
    assert scheduler.abort(0)
    assert cache.cached(0) == blocks - 1
    assert scheduler.abort(1)
    assert cache.cached(0) == blocks - 1
    assert scheduler.abort(2)
    assert cache.free(0) == 40
    assert to_the_end(scheduler) == [(9, 0, 3)]


def test_blocks_of_a_shared_prompt_are_found_where_they_moved() -> None:
    """Though the cache is off: a follower waits for them."""
    cache = PrefixCache(BlockPool(2, 12, SIZE), enabled=False)
    scheduler = Scheduler(cache, SchedulerConfig(8, 8, SIZE, 9, servers=1))
    scheduler.add(1, [5] * 22, 1, leader=0)
    scheduler.add(0, [5] * 22, 1)
    moves, first = [], {}
    while (batch := scheduler.schedule()) is not None:
        moves += [(move.sequence, move.index, move.to.rank) for move in batch.moves]
        for feed in batch.feeds:
            first.setdefault(feed.sequence, feed)
        scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    assert moves == [(0, 1, 1), (0, 3, 1)]
    assert (first[1].start, first[1].count) == (20, 2)
    assert [block.rank for block in first[1].new_blocks] == [0, 1, 0, 1, 0, 0]
    assert [cache.free(rank) for rank in range(2)] == [12, 12]


def test_blocks_that_are_computed_again_move_again() -> None:
    """A sequence that gave up its blocks has none that are where they should be."""
    cache = PrefixCache(BlockPool(2, 7, SIZE), enabled=False)
    scheduler = Scheduler(cache, SchedulerConfig(8, 9, SIZE, 9, servers=1))
    scheduler.add(1, [6] * 4, 32)
    iterate(scheduler)
    scheduler.add(0, [5] * 40, 9)
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
    scheduler.add(0, [5] * 20, 5)
    moved = []
    for _ in range(8):
        batch = scheduler.schedule()
        if batch is not None:
            moved += [move.index for move in batch.moves]
            scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    assert scheduler.running == scheduler.waiting == scheduler.preemptions == 0
    assert moved == [0, 1, 2]


def test_scored_prompts_are_computed_whole_and_in_small_chunks() -> None:
    cache = PrefixCache(BlockPool(1, 400, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(8, 4 * MOST_SCORED, SIZE, 9))
    counts = []
    for number in range(2):
        scheduler.add(number, [5] * (MOST_SCORED + 9), 1, scored=number == 1)
        while (batch := scheduler.schedule()) is not None:
            counts += [(feed.start, feed.count) for feed in batch.feeds]
            scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    assert counts == [(0, MOST_SCORED + 9), (0, MOST_SCORED), (MOST_SCORED, 9)]


def test_scored_prompts_share_the_logits_of_an_iteration() -> None:
    """Whether they are admitted or run already."""
    cache = PrefixCache(BlockPool(1, 400, SIZE))
    scheduler = Scheduler(cache, SchedulerConfig(8, 4 * MOST_SCORED, SIZE, 9))
    for number in range(3):
        scheduler.add(number, [number] * (MOST_SCORED - 50), 1, scored=number < 2)
    fed = []
    while (batch := scheduler.schedule()) is not None:
        fed.append([(feed.sequence, feed.start, feed.count) for feed in batch.feeds])
        scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    first, rest = MOST_SCORED - 50, MOST_SCORED - 100
    assert fed == [[(0, 0, first), (1, 0, 50), (2, 0, first)], [(1, 50, rest)]]
