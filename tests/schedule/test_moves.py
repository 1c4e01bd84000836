"""Answers that share a prompt, and blocks that move: followed through the scheduler at random."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.prefix_cache import Block, PrefixCache
from distca.schedule.serving.scheduler import MOST_SCORED, Batch, Limits, Scheduler

SIZE = 4


class Walk:
    """Sequences that come, run, end and are aborted; what each block's rows hold is followed.

    Args:
        seed: seed of the walk.
        ranks: ranks that there are.
        servers: those that have no weights.
        blocks: blocks of a rank.
        enabled: whether the prefix cache is on.
    """

    def __init__(self, seed: int, ranks: int, servers: int, blocks: int, enabled: bool) -> None:
        self.chance, self.ranks, self.servers, self.blocks = (
            random.Random(seed),
            ranks,
            servers,
            blocks,
        )
        self.cache = PrefixCache(BlockPool(ranks, blocks, SIZE), enabled)
        self.scheduler = Scheduler(self.cache, Limits(4, 16, SIZE, 9, servers), b"model")
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[Block]] = {}
        self.rows: dict[tuple[Block, int], tuple[int, ...]] = {}
        self.number = self.moves = 0

    def arrive(self) -> None:
        """Answers to a prompt, of which one computes it and the others follow."""
        length, alike = self.chance.randint(1, 24), self.chance.choice([0, 6, 20])
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

    def abort(self, batch: Batch | None) -> None:
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
    ("ranks", "servers", "blocks", "enabled"),
    [(2, 0, 6, True), (2, 0, 6, False), (3, 1, 5, True), (3, 2, 4, False)],
)
def test_no_block_is_lost_or_mixed_up(
    ranks: int, servers: int, blocks: int, enabled: bool, full: bool
) -> None:
    for seed in range(200 if full else 20):
        walk = Walk(seed, ranks, servers, blocks, enabled)
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
        assert (walk.moves > 0) == (servers > 0)


def test_one_answer_computes_the_prompt_of_all() -> None:
    cache = PrefixCache(BlockPool(2, 40, SIZE), enabled=False)
    scheduler = Scheduler(cache, Limits(8, 64, SIZE, 9))
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


def test_blocks_make_room_before_a_sequence_gives_up_its_own() -> None:
    """Even those whose stripes are of the rank that computes."""
    cache = PrefixCache(BlockPool(2, 3, SIZE))
    scheduler = Scheduler(cache, Limits(8, 64, 16 * SIZE, 9, servers=1))
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
    scheduler = Scheduler(cache, Limits(8, 4 * MOST_SCORED, SIZE, 9))
    counts = []
    for number in range(2):
        scheduler.add(number, [5] * (MOST_SCORED + 9), 1, scored=number == 1)
        while (batch := scheduler.schedule()) is not None:
            counts += [(feed.start, feed.count) for feed in batch.feeds]
            scheduler.advance(batch, {feed.sequence: 1 for feed in batch.feeds if feed.samples})
    assert counts == [(0, MOST_SCORED + 9), (0, MOST_SCORED), (MOST_SCORED, 9)]
