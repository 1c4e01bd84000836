"""Random walks of the scheduler of an engine, in which the rows of all blocks are followed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from distca.schedule.serving.blocks import Block, BlockPool, PrefixCache
from distca.schedule.serving.cdsp import Chunk, Coefficients, PrefillModel, PrefillPlan, Search
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import SchedulerOutput
from distca.schedule.serving.scheduler import Scheduler

SIZE = 4
# A rank is as fast as two for 10 tokens, and slower for more.
TIMES = PrefillModel(
    "any", "any", {n: Coefficients(5.0 * (n - 1), 1 / n, 0.0, 0.0) for n in (1, 2, 4)}
)


class AnyGroups(GrowingGroups):
    """Any chunks on any nested groups, of any number of ranks."""

    def plan(
        self,
        queued: Sequence[float],
        tokens: int,
        cached: int,
        holders: Ranks,
        growth: tuple[float, float] | None = None,
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
        longest: most tokens of a prompt; answers add 12.
    """

    def __init__(
        self,
        seed: int,
        ranks: int,
        servers: int,
        blocks: int,
        enabled: bool,
        growing: GrowingGroups | None = None,
        longest: int = 24,
    ) -> None:
        self.chance, self.ranks, self.servers, self.blocks = (
            random.Random(seed),
            ranks,
            servers,
            blocks,
        )
        self.longest = longest
        self.cache = PrefixCache(BlockPool(ranks, blocks, SIZE))
        limits = SchedulerConfig(4, 16, SIZE, 9, servers, growing=growing, prefix_caching=enabled)
        self.growing = growing
        self.scheduler = Scheduler(self.cache, limits, b"model")
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[Block]] = {}
        self.rows: dict[tuple[Block, int], tuple[int, ...]] = {}
        self.number = self.moves = 0

    def arrive(self) -> None:
        """Answers to a prompt, of which one computes it and the others follow."""
        length, alike = self.chance.randint(1, self.longest), self.chance.choice([0, 6, 20])
        choices = self.chance.choice([1, 1, 3])
        prompt = [7] * min(alike, length) + [100 + self.number] * max(length - alike, 0)
        leader = self.number
        numbers = [*range(leader + 1, leader + choices), leader]
        for each in numbers:
            new, scored = self.chance.randint(1, 12), each == leader and self.chance.random() < 0.3
            given = None if each == leader else leader
            self.scheduler.add(Request(each, prompt, new, leader=given, scored=scored))
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
        admitted = {feed.sequence for feed in batch.feeds if feed.admitted}
        for move in batch.moves:
            if self.growing is None:
                assert move.to.rank >= self.ranks - self.servers > move.source.rank
            if move.sequence in self.tables:
                # What was found of a sequence may move before it is admitted.
                known = {move.source, move.to} if move.sequence in admitted else {move.source}
                assert self.tables[move.sequence][move.index] in known
                self.tables[move.sequence][move.index] = move.to
        for feed in batch.feeds:
            table, tokens, end = self.tables[feed.sequence], self.tokens[feed.sequence], feed.start
            for position in range(feed.start):
                assert self.rows[table[position // SIZE], position % SIZE] == (
                    *tokens[: position + 1],
                )
            end += feed.count
            assert feed.start < end <= len(tokens)
            assert feed.samples == (end == len(tokens))
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
