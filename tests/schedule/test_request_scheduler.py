"""The scheduler of an engine: no block is lost or mixed up, and every sequence comes to its end."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from distca.plan import Mask, validate_stepped_plan
from distca.schedule.serving.blocks import Block, BlockPool, PrefixCache, extend_digests
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import ScheduledTokens, SchedulerOutput
from distca.schedule.serving.scheduler import Scheduler

RANKS, BLOCKS, SIZE = 2, 6, 4


def scheduler_of(
    blocks: int = BLOCKS,
    tokens: int = 16,
    sequences: int = 4,
    short: int = 9,
    enabled: bool = True,
) -> tuple[Scheduler, PrefixCache]:
    cache = PrefixCache(BlockPool(RANKS, blocks, SIZE))
    limits = SchedulerConfig(sequences, tokens, SIZE, short, prefix_caching=enabled)
    return Scheduler(cache, limits, b"model"), cache


class Engine(RuleBasedStateMachine):
    """Sequences that come, run, end and are aborted; what their blocks hold is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.cache = scheduler_of()
        self.tokens: dict[int, list[int]] = {}
        self.most: dict[int, int] = {}
        self.salts: dict[int, bytes] = {}
        self.requests: dict[int, Request] = {}
        self.tables: dict[int, list[Block]] = {}
        self.rows: dict[tuple[Block, int], tuple[bytes, ...]] = {}
        self.batch: SchedulerOutput | None = None
        self.number = 0

    @rule(
        length=st.integers(1, 20),
        alike=st.sampled_from([0, 6, 20]),
        new=st.integers(0, 12),
        priority=st.sampled_from([0, 0, 1, 2]),
        salt=st.sampled_from([b"", b"", b"salt"]),
    )
    def arrive(self, length: int, alike: int, new: int, priority: int, salt: bytes) -> None:
        """A sequence whose first tokens are those of others; without an answer it is held."""
        alike = min(alike, length)
        tokens = [7] * alike + [100 + self.number] * (length - alike)
        self.salts[self.number] = salt
        request = Request(self.number, tokens, new, priority=priority, salt=salt)
        self.scheduler.add(request)
        self.requests[self.number] = request
        self.tokens[self.number], self.most[self.number] = tokens, length + new
        self.number += 1

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.tokens:
            number = data.draw(st.sampled_from(sorted(self.tokens)))
            assert self.scheduler.abort(number)
            assert not self.scheduler.abort(number)
            self.forget(number)

    def forget(self, number: int) -> None:
        del self.tokens[number]
        if not self.batch or number not in {feed.sequence for feed in self.batch.feeds}:
            self.tables.pop(number, None)

    @rule()
    def schedule(self) -> None:
        if self.batch is not None:
            return
        self.batch = self.scheduler.schedule()
        if self.batch is None:
            # Nothing runs. What waits finds no room beside prompts that are held.
            assert not self.scheduler.running
            assert self.scheduler.held or not self.tokens
            # An answer that gave up its blocks in vain is told of with the next iteration.
            self.tables = {n: table for n, table in self.tables.items() if self.holds(n)}
            return
        for number in self.batch.preempted:
            assert not self.holds(number), "a prompt that is held gave up its blocks"
            self.tables.pop(number, None)
        assert sum(feed.count for feed in self.batch.feeds) <= 16
        for feed in self.batch.feeds:
            tokens = self.tokens[feed.sequence]
            if feed.admitted:
                assert feed.sequence not in self.tables
                self.tables[feed.sequence] = []
            table = self.tables[feed.sequence]
            table += feed.new_blocks
            end = feed.start + feed.count
            assert len(table) == -(-end // SIZE)
            answered = self.most[feed.sequence] > len(tokens)
            assert feed.samples == (end == len(tokens) and answered)
            # What it did not compute itself was computed of the same prefix.
            for position in range(feed.start if feed.admitted else 0):
                row = self.rows[table[position // SIZE], position % SIZE]
                assert row == self.row(feed.sequence, position)
            for position in range(feed.start, end):
                place = table[position // SIZE], position % SIZE
                self.rows[place] = self.row(feed.sequence, position)

    def row(self, number: int, position: int) -> tuple[bytes, ...]:
        """What keys and values of a position depend on."""
        before = self.tokens[number][: position + 1]
        return self.salts[number], *(b"%d" % token for token in before)

    def is_held(self, number: int) -> bool:
        """Whether all of a prompt is computed for somebody else."""
        return number in self.tables and self.requests[number].computed == self.most[number]

    def holds(self, number: int) -> bool:
        return self.most[number] == len(self.tokens[number])

    @rule(token=st.integers(0, 2))
    def advance(self, token: int) -> None:
        if self.batch is None:
            return
        chosen = {feed.sequence: token for feed in self.batch.feeds if feed.samples}
        batch, self.batch = self.batch, None
        advances = self.scheduler.advance(batch, chosen)
        assert {each.sequence for each in advances} == chosen.keys() & self.tokens.keys()
        for each in advances:
            self.tokens[each.sequence].append(each.token)
            ended = len(self.tokens[each.sequence]) == self.most[each.sequence]
            assert (each.finish == "length") == ended
            if ended:
                self.forget(each.sequence)
        for feed in batch.feeds:
            if feed.sequence not in self.tokens:
                self.tables.pop(feed.sequence, None)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert not any(self.cache.cached(rank) for rank in range(RANKS))

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        held = Counter(block for table in self.tables.values() for block in table)
        for rank in range(RANKS):
            cache = self.cache
            assert cache.free(rank) + cache.referenced(rank) + cache.cached(rank) == BLOCKS
            assert cache.referenced(rank) == sum(block.rank == rank for block in held)

    @invariant()
    def rows_stay(self) -> None:
        """Rows that a sequence computed are still its own, or its like's."""
        for number, table in self.tables.items():
            tokens = self.tokens.get(number)
            if tokens is not None and not self.batch:
                for position in range(self.requests[number].computed):
                    row = self.rows[table[position // SIZE], position % SIZE]
                    assert row == self.row(number, position)

    def teardown(self) -> None:
        """All come to their end, and nothing but the cache holds a block then."""
        for _ in range(2000):
            if not self.tokens and not self.batch:
                break
            self.schedule()
            self.advance(1)
            for number in [each for each in self.tokens if self.holds(each)]:
                if self.scheduler.held and self.is_held(number):
                    assert self.scheduler.abort(number)
                    self.forget(number)
            self.every_block_is_accounted_for()
        assert not self.tokens
        assert not self.scheduler.running + self.scheduler.waiting
        self.cache.reset()
        assert all(self.cache.free(rank) == BLOCKS for rank in range(RANKS))


def test_a_prompt_that_is_held_keeps_its_blocks_and_chooses_no_token() -> None:
    scheduler, cache = scheduler_of(blocks=6, tokens=8)
    held = Request(0, [1] * 20, 0)
    scheduler.add(held)
    batches = run(scheduler)
    assert [feed.count for batch in batches for feed in batch.feeds] == [8, 8, 4]
    assert not any(feed.samples for batch in batches for feed in batch.feeds)
    assert (scheduler.held, scheduler.running, held.computed) == (1, 0, 20)
    # 7 of 12 blocks are left, so this needs what is held, and waits for it.
    scheduler.add(Request(1, [2] * 32, 0))
    assert scheduler.schedule() is None
    assert scheduler.abort(0)
    assert not scheduler.abort(0)
    assert [feed.count for batch in run(scheduler) for feed in batch.feeds] == [8] * 4
    assert scheduler.abort(1)
    # Full blocks are found by whoever comes next; the last token is fed in any case.
    scheduler.add(Request(2, [2] * 32, 0))
    assert [feed.start for batch in run(scheduler) for feed in batch.feeds] == [28]
    assert sum(map(cache.referenced, range(RANKS))) == 8


def test_a_prompt_to_hold_is_admitted_with_room_for_all_of_it() -> None:
    scheduler, _ = scheduler_of(blocks=6, tokens=8)
    scheduler.add(Request(0, [1] * 4, 40))
    scheduler.add(Request(1, [2] * 32, 0))
    batch = scheduler.schedule()
    assert batch is not None
    assert [feed.sequence for feed in batch.feeds] == [0, 1]
    while batch is not None:
        assert not batch.preempted
        scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
        batch = scheduler.schedule()
    # The answer gave up its blocks when it had used those that were left, and waits.
    assert (scheduler.held, scheduler.waiting, scheduler.running) == (1, 1, 0)
    scheduler.abort(1)
    # The next iteration tells.
    assert [batch.preempted for batch in run(scheduler) if batch.preempted] == [(0,)]
    assert not scheduler.waiting + scheduler.running


def test_priorities_decide_who_is_admitted_and_who_gives_up_blocks() -> None:
    scheduler, _ = scheduler_of(blocks=3, tokens=8, sequences=2)
    for number, priority in enumerate([1, 1, 0, 0]):
        scheduler.add(Request(number, [number] * 4, 12, priority=priority))
    admitted, preempted = [], []
    while (batch := scheduler.schedule()) is not None:
        admitted += [feed.sequence for feed in batch.feeds if feed.admitted]
        preempted += batch.preempted
        scheduler.advance(batch, {feed.sequence: 9 for feed in batch.feeds if feed.samples})
    assert [each for number, each in enumerate(admitted) if each not in admitted[:number]] == [
        *(2, 3, 0, 1)
    ]
    # Each answer ends with 15 rows in 4 of 6 blocks.
    assert preempted
    assert set(preempted) <= {3, 1, 0}
    assert not scheduler.waiting


def test_no_block_is_lost_or_mixed_up(full: bool) -> None:
    transitions = 0

    class Counted(Engine):
        @invariant()
        def count(self) -> None:
            nonlocal transitions
            transitions += 1

    steps = settings(max_examples=250 if full else 25, stateful_step_count=50)
    run_state_machine_as_test(Counted, settings=steps)
    assert transitions >= (10_000 if full else 1_000)


def run(scheduler: Scheduler, *, token: int = 1) -> list[SchedulerOutput]:
    """All iterations until nothing is left."""
    batches = []
    while (batch := scheduler.schedule()) is not None:
        batches.append(batch)
        scheduler.advance(batch, {feed.sequence: token for feed in batch.feeds if feed.samples})
    return batches


def test_chunks_and_decodes_share_iterations() -> None:
    scheduler, _ = scheduler_of(tokens=8)
    scheduler.add(Request(0, [1] * 4, 6))
    scheduler.add(Request(1, [2] * 12, 2))
    counts = [[(feed.sequence, feed.count) for feed in batch.feeds] for batch in run(scheduler)]
    assert counts[:3] == [[(0, 4), (1, 4)], [(0, 1), (1, 7)], [(0, 1), (1, 1)]]
    assert sum(count for batch in counts for _, count in batch) == 4 + 5 + 12 + 1


def test_an_answer_ends_with_the_token_that_stops_it() -> None:
    """Neither a stop in the prompt nor one among the fewest tokens ends it."""
    scheduler, _ = scheduler_of()
    scheduler.add(Request(0, [3, 9], 6, frozenset({9}), fewest_new=2))
    ends = []
    for token in (4, 9, 5, 9):
        batch = scheduler.schedule()
        assert batch is not None
        ends += [each.finish for each in scheduler.advance(batch, {0: token})]
    assert ends == [None, None, None, "stop"]
    assert scheduler.schedule() is None


def test_a_second_turn_computes_its_new_tokens_alone() -> None:
    scheduler, _ = scheduler_of(blocks=12)
    scheduler.add(Request(0, list(range(17)), 3))
    run(scheduler)
    first = [*range(17), 1, 1]
    scheduler.add(Request(1, [*first, 50, 51], 1))
    (batch,) = run(scheduler)
    assert [(feed.start, feed.count) for feed in batch.feeds] == [(16, 5)]
    assert (scheduler.found, scheduler.looked_up) == (16, 17 + 21)
    scheduler, _ = scheduler_of(blocks=12, enabled=False)
    for number in range(2):
        scheduler.add(Request(number, first, 1))
        run(scheduler)
    assert scheduler.found == 0
    # A prompt of full blocks still has a token to compute.
    of_a, of_b = (extend_digests([], [1] * 8, SIZE, salt) for salt in (b"a", b"b"))
    assert of_a[1] != of_b[1]


def test_the_least_recently_used_blocks_are_given_back_first() -> None:
    cache = PrefixCache(BlockPool(1, 3, SIZE))
    blocks = [cache.take(0) for _ in range(3)]
    names = [b"first", b"second", b"third"]
    for block, name in zip(blocks, names, strict=True):
        cache.keep(block, name)
    cache.release(blocks)
    assert cache.take(0) == blocks[2]
    assert cache.find(names) == blocks[:2]


def test_short_sequences_stay_at_home_and_long_ones_are_shared_out() -> None:
    scheduler, _ = scheduler_of(blocks=20, tokens=64)
    scheduler.add(Request(0, [1] * 5, 2))
    scheduler.add(Request(1, [2] * 5, 2))
    scheduler.add(Request(2, [3] * 32, 9))
    owners: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for batch in run(scheduler):
        for feed in batch.feeds:
            owners[feed.sequence] += [block.rank for block in feed.new_blocks]
    # Zigzag, and then stripes.
    assert owners == {0: [0, 0], 1: [1, 1], 2: [0, 0, 1, 1, 1, 1, 0, 0, 0, 1]}


def test_a_stop_ends_an_answer_that_has_its_fewest_tokens() -> None:
    scheduler, _ = scheduler_of()
    scheduler.add(Request(0, [5] * 4, 9, frozenset({1}), fewest_new=3))
    finishes = []
    while (batch := scheduler.schedule()) is not None:
        finishes += [each.finish for each in scheduler.advance(batch, {0: 1})]
    assert finishes == [None, None, None, "stop"]


def test_a_short_sequence_is_at_home_where_few_others_are() -> None:
    """Then where there is room, but where its blocks are before all."""
    # The last finds one sequence on each rank and more room, or fewer and as much room.
    for lengths, homes in (((8, 3, 3), [0, 1, 1]), ((3, 8, 3, 3), [0, 1, 0, 1])):
        scheduler, _ = scheduler_of(blocks=20, tokens=64)
        for number, length in enumerate(lengths):
            scheduler.add(Request(number, [number] * length, 1))
        (batch,) = run(scheduler)
        assert [feed.new_blocks[-1].rank for feed in batch.feeds] == homes
    scheduler.add(Request(4, [9], 1))
    scheduler.add(Request(5, [8], 1))
    scheduler.add(Request(6, [1] * 8, 1))
    (batch,) = run(scheduler)
    assert [feed.new_blocks[-1].rank for feed in batch.feeds] == [0, 1, 1]


def test_stripes_of_sequences_begin_on_different_ranks() -> None:
    """And a sequence is long with as many tokens as the limit says, and short with one less."""
    scheduler, _ = scheduler_of(blocks=20, tokens=64)
    for number in (1, 2, 3):
        scheduler.add(Request(number, [number] * 8, 9))
    owners: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for batch in run(scheduler):
        for feed in batch.feeds:
            owners[feed.sequence] += [block.rank for block in feed.new_blocks]
    # Eight tokens are short: at home. The ninth is in a stripe, of which each has a block.
    assert {number: ranks[:2] for number, ranks in owners.items()} == {
        1: [0, 0],
        2: [1, 1],
        3: [0, 0],
    }
    assert {number: ranks[2:] for number, ranks in owners.items()} == {
        1: [1, 0],
        2: [0, 1],
        3: [1, 0],
    }


@pytest.mark.parametrize("tokens", [64, 4096])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_fresh_prefill_fills_ranks_evenly(ranks: int, tokens: int) -> None:
    """By two blocks at most, in one chunk or after several, which are shared out each for itself;
    decoded tokens add a stripe."""
    for length in (65, 200, 1000, 3001):
        cache = PrefixCache(BlockPool(ranks, 1000, SIZE))
        scheduler = Scheduler(cache, SchedulerConfig(4, tokens, 2 * SIZE, 9), b"model")
        scheduler.add(Request(0, list(range(length)), 20))
        rows = np.zeros(ranks, dtype=np.int64)
        held = 0
        while batch := scheduler.schedule():
            (feed,) = batch.feeds
            for number, block in enumerate(feed.new_blocks):
                rows[block.rank] += min(SIZE, feed.start + feed.count - (held + number) * SIZE)
            held += len(feed.new_blocks)
            if feed.samples and feed.count > 1:
                assert np.ptp(rows) <= 2 * SIZE, (length, rows)
            scheduler.advance(batch, {0: 1} if feed.samples else {})
        assert held * SIZE >= length + 19


def test_chunks_of_long_sequences_are_cut_for_a_chain() -> None:
    """Between blocks, from the last rank down, and by what is before a chunk; decoded ones not."""
    cache = PrefixCache(BlockPool(RANKS, 40, SIZE))
    chain = Chain(RANKS, (0.75, 0.25))
    scheduler = Scheduler(cache, SchedulerConfig(4, 32, SIZE, 9, chain=chain), b"model")
    scheduler.add(Request(0, [3] * 64, 9))
    feeds = [feed for batch in run(scheduler) for feed in batch.feeds]
    owners = [[block.rank for block in feed.new_blocks] for feed in feeds if feed.new_blocks]
    assert owners == [[1] * 6 + [0] * 2, [1] * 5 + [0] * 3, [0], [1]]


def test_what_could_never_be_held_is_refused() -> None:
    scheduler, _ = scheduler_of()
    scheduler.add(Request(0, [1] * 40, 9))
    with pytest.raises(ValueError, match="49 tokens need more than the 48"):
        scheduler.add(Request(1, [1] * 40, 10))
    with pytest.raises(ValueError, match="raise --max-num-batched-tokens"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4, stripe=4, threshold=1)


@pytest.mark.parametrize("strategy", ["pass-kv", "pass-q"])
def test_plans_of_iterations_are_valid(strategy) -> None:
    """With blocks anywhere; what lies on one rank moves nothing."""
    random = np.random.default_rng(0)
    masks = (Mask(), Mask(5))
    parts = []
    for number, (start, count) in enumerate([(0, 30), (16, 1), (13, 9), (40, 1), (0, 3)]):
        ranks = random.integers(0, 3, -(-(start + count) // SIZE))
        if number == 4:
            ranks[:] = 2
        parts.append(ScheduledTokens(number + 5, start, count, ranks))
    whole = plan_iteration(parts, masks, SIZE, 3, strategy)
    assert whole.prefill is not None
    assert whole.decode is not None
    assert whole.prefill.sequences == (5, 7, 9)
    assert whole.prefill.before.sum(axis=1).tolist() == [0, 13, 0]
    assert whole.decode.sequences == (6, 8)
    assert whole.decode.rows.sum(axis=1).tolist() == [17, 41]
    assert int(whole.new_tokens.sum()) == 44
    for stepped in whole.prefill.plans.by_mask.values():
        validate_stepped_plan(stepped)
        assert stepped.plan.cached_prefix.tolist() == [0, 13, 0]
        assert int(stepped.plan.own_tokens_per_rank().sum()) == 42
    # A rank that only has earlier keys takes part: it sends them, or computes on them.
    ranks = np.array([2, 2, 0, 0])
    earlier = plan_iteration([ScheduledTokens(0, 8, 8, ranks)], masks[:1], SIZE, 3, strategy)
    assert earlier.members == {0, 2}
    assert earlier.new_tokens.tolist() == [8, 0, 0]
    alone = plan_iteration(parts[4:], masks, SIZE, 3, strategy)
    assert alone.members == {2}
    decode = plan_iteration(parts[3:4], masks[:1], SIZE, 3, strategy)
    assert decode.members == {*parts[3].ranks.tolist()}
    # A window hides all but the last of the rows.
    near = plan_iteration(parts[3:4], masks[1:], SIZE, 3, strategy)
    assert near.members == {*parts[3].ranks[35 // SIZE :].tolist()}


def test_a_chunk_without_blocks_waits_whole() -> None:
    scheduler, _ = scheduler_of(blocks=2, tokens=99)
    scheduler.add(Request(0, [1] * 8, 4))
    scheduler.add(Request(1, [2] * 12, 4))
    batch = scheduler.schedule()
    assert batch is not None
    assert [(feed.sequence, feed.count) for feed in batch.feeds] == [(0, 8)]
