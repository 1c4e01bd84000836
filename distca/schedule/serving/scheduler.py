"""The scheduler of a serving engine: which tokens of which sequences the next iteration feeds.

A pure function of what it was told, so that a simulator can run it as an engine does. An iteration
feeds chunks of prompts and decoded tokens together, up to a number of tokens. Sequences that wait
are admitted in the order of their arrival; if there are no blocks for one that runs, the youngest
gives up its own and is computed again later, of which the prefix cache may still have most.

Blocks of a short sequence lie on one rank, its *home*, which computes it without any exchange. Of a
long one, each chunk's blocks are shared out in zigzag, and decoded ones in stripes. With a chain a
chunk is cut between blocks: each lies on one rank, where other sequences can find it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distca.schedule.serving.csps.levels import Levels
from distca.schedule.serving.moves import BlockTransfer, Mover
from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.prefix_cache import Block, PrefixCache, extend_digests
from distca.schedule.serving.request import FinishReason, Request, SharedPrompt

MOST_SCORED = 256
"""Tokens of prompts that are scored, of an iteration: each has logits of the whole vocabulary."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Bounds and rules of a scheduler.

    Attributes:
        sequences: most sequences that run at a time.
        tokens: most tokens that an iteration feeds.
        stripe: consecutive decoded positions of a long sequence that one rank owns; a multiple of
            the blocks' size.
        short: tokens below which a sequence is short.
        servers: ranks, the last ones, that hold keys and values, and have no weights.
        chain: who shares out chunks of long sequences, a chain or levels; None: in zigzag.
        evens_out: whether blocks move once a prompt is computed, until all ranks hold equal shares,
            as a chain does not leave them.

    Raises:
        ValueError: the limits contradict each other.
    """

    sequences: int
    tokens: int
    stripe: int
    short: int
    servers: int = 0
    chain: Chain | Levels | None = None
    evens_out: bool = False

    def __post_init__(self) -> None:
        if self.tokens < self.sequences:
            raise ValueError(
                f"an iteration of {self.tokens} tokens cannot feed one of each of {self.sequences} "
                "sequences: raise --max-num-batched-tokens, or lower --max-num-seqs"
            )


@dataclass(frozen=True)
class ScheduledTokens:
    """What an iteration feeds of a sequence.

    Attributes:
        sequence: number of the sequence.
        start: position of the first token that is fed.
        count: tokens that are fed.
        samples: whether the token that follows is chosen.
        new_blocks: blocks that were added since the sequence's last feed; all, if `start` is that
            of its admission.
        admitted: whether the sequence was not running before.
    """

    sequence: int
    start: int
    count: int
    samples: bool
    new_blocks: tuple[Block, ...]
    admitted: bool


@dataclass(frozen=True)
class SchedulerOutput:
    """An iteration.

    Attributes:
        feeds: what is fed, the oldest sequence first.
        preempted: sequences that gave up their blocks, and wait again.
        moves: blocks that change their ranks before anything else.
    """

    feeds: tuple[ScheduledTokens, ...]
    preempted: tuple[int, ...]
    moves: tuple[BlockTransfer, ...] = ()


@dataclass(frozen=True)
class TokenUpdate:
    """What an iteration brought a sequence.

    Attributes:
        sequence: number of the sequence.
        token: token that was chosen.
        finish: why the answer has ended; None: it goes on.
    """

    sequence: int
    token: int
    finish: FinishReason | None


def is_long(prompt: int, limits: SchedulerConfig) -> bool:
    """Returns whether chunks of a prompt of so many tokens may drop rows, for all of its sequence's
    life: a short prompt's never do, however long its answer is when it is computed again."""
    return prompt >= limits.short


class Scheduler:
    """Sequences that wait and run, and their blocks.

    Args:
        cache: blocks of all ranks.
        limits: bounds and rules.
        salt: what keys and values depend on beside tokens: the model.
        sparse_salt: that of sequences of long prompts, whose chunks may drop rows; None: alike.

    Attributes:
        preemptions: times that a sequence gave up its blocks.
        looked_up: tokens of admitted sequences that were looked up in the prefix cache.
        found: tokens of these that it had.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerConfig,
        salt: bytes = b"",
        sparse_salt: bytes | None = None,
    ) -> None:
        self._cache, self._limits = cache, limits
        self._salt, self._sparse_salt = salt, salt if sparse_salt is None else sparse_salt
        self._block_size, self._world_size = cache.pool.block_size, cache.pool.world_size
        # Ranks that compute keys and values; the others hold some.
        self._computing = range(self._world_size - limits.servers)
        self._mover = Mover(cache, limits.servers, limits.stripe)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._aborted: set[int] = set()
        # Sequences that wait until another has computed the prompt that they share, by its number.
        self._followers: dict[int, list[Request]] = {}
        self.preemptions = self.looked_up = self.found = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return len(self._waiting) + sum(map(len, self._followers.values()))

    @property
    def running(self) -> int:
        """Sequences that run."""
        return len(self._running)

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence whose keys and values all ranks' pools can hold."""
        return self._cache.pool.blocks_per_rank * self._world_size * self._block_size

    def add(
        self,
        number: int,
        tokens: Sequence[int],
        most_new: int,
        stops: frozenset[int] = frozenset(),
        fewest_new: int = 0,
        leader: int | None = None,
        scored: bool = False,
        chain: Chain | None = None,
    ) -> None:
        """Adds a sequence.

        One prompt's answers share what is computed of it: one of them leads, and is added last.

        Args:
            number: a number that no other sequence has.
            tokens: prompt, at least one token.
            most_new: most tokens of the answer, at least one.
            stops: tokens that end the answer.
            fewest_new: fewest tokens of an answer that they may end.
            leader: sequence with the same prompt, which computes it; None: itself does.
            scored: whether all tokens of the prompt are to be computed, since they are scored.
            chain: chain that shares out the prompt, however short it is; None: that of the limits.

        Raises:
            ValueError: its keys and values could never be held.
        """
        assert tokens, "a sequence needs tokens"
        assert most_new > 0, "an answer has tokens"
        most = len(tokens) + most_new
        # The last token of an answer is never fed.
        if most - 1 > self.capacity:
            raise ValueError(
                f"{most - 1:,} tokens need more than the {self.capacity:,} whose keys and values "
                "the ranks can hold: shorten the prompt, ask for fewer tokens, or raise "
                "--kv-cache-memory-bytes"
            )
        prompt = list(tokens)
        fewest = len(prompt) + fewest_new
        each = Request(number, prompt, len(prompt), most, stops, fewest, scored=scored)
        each.block_size, each.chain = self._block_size, chain
        if leader is None:
            self._waiting.append(each)
        else:
            self._followers.setdefault(leader, []).append(each)

    def abort(self, number: int) -> bool:
        """Ends a sequence in whatever state it is; returns whether there was one.

        What an iteration under way computes of it is given back once that has ended.
        """
        for each in self._waiting:
            if each.number == number:
                self._waiting.remove(each)
                self._leave_prefix(each)
                self._hand_over(each)
                return True
        for leader, followers in self._followers.items():
            for each in followers:
                if each.number == number:
                    followers.remove(each)
                    if not followers:
                        self._let_go(leader)
                    return True
        for each in self._running:
            if each.number == number and number not in self._aborted:
                if each.fed:
                    self._aborted.add(number)
                else:
                    self._end(each)
                    self._hand_over(each)
                return True
        return False

    def schedule(self) -> SchedulerOutput | None:
        """Decides what the next iteration feeds; None if there is nothing.

        The iteration has to be told of by `advance` before the next is asked for.
        """
        assert not any(each.fed for each in self._running), "an iteration is under way"
        feeds: list[ScheduledTokens] = []
        preempted: list[int] = []
        moves = self._mover.settle(self._long())
        if self._limits.evens_out:
            moves += self._mover.even_out(self._just_computed())
        left, scored = self._limits.tokens, MOST_SCORED
        number = 0
        while number < len(self._running) and left:
            each = self._running[number]
            # Every sequence after this one gets a token at least.
            others = len(self._running) - number - 1
            count = min(len(each.tokens) - each.computed, max(left - others, 1))
            if each.scored:
                count = min(count, scored)
                scored -= count
            if not count:
                number += 1
                continue
            if not preempted:
                count = self._make_room(each, count, moves)
            while not self._has_blocks(each, count):
                youngest = self._running[-1]
                self._preempt(youngest)
                preempted.append(youngest.number)
                if youngest is each:
                    break
            else:
                feeds.append(self._feed(each, count, admitted=False))
                left -= count
                number += 1
        while self._waiting and left and not preempted:
            if len(self._running) == self._limits.sequences:
                break
            each = self._waiting[0]
            self._look_up(each)
            count = min(len(each.tokens) - each.computed, left)
            if each.scored:
                count = min(count, scored)
                scored -= count
            if count:
                count = self._make_room(each, count, moves)
            if not count or not self._has_blocks(each, count):
                self._give_back(each)
                break
            self._waiting.popleft()
            self._running.append(each)
            self.looked_up += len(each.tokens)
            self.found += each.computed
            self._leave_prefix(each)
            each.home = self._choose_home(each)
            feeds.append(self._feed(each, count, admitted=True))
            left -= count
        return (
            SchedulerOutput(tuple(feeds), tuple(preempted), tuple(moves))
            if feeds or moves
            else None
        )

    def advance(self, batch: SchedulerOutput, chosen: Mapping[int, int]) -> list[TokenUpdate]:
        """Takes in what an iteration computed.

        Args:
            batch: the iteration, the last that was scheduled.
            chosen: token that was chosen, for each sequence that samples.

        Returns:
            Tokens of the sequences that were not aborted meanwhile.
        """
        running = {each.number: each for each in self._running}
        advances = []
        for feed in batch.feeds:
            each = running[feed.sequence]
            each.fed = 0
            if each.number in self._aborted:
                self._aborted.remove(each.number)
                self._end(each)
                self._hand_over(each)
                continue
            before = each.computed // self._block_size
            each.computed += feed.count
            self._extend_digests(each)
            leads = each.number in self._followers
            for full in range(before, each.computed // self._block_size):
                self._cache.keep(each.blocks[full], each.digests[full], waited=leads)
            if feed.samples:
                each.scored = False
                if leads:
                    self._share_prompt(each)
                advances.append(self._append(each, chosen[each.number]))
        return advances

    def computed(self, number: int) -> int:
        """Returns the tokens of a running sequence whose keys and values are held."""
        return next(each.computed for each in self._running if each.number == number)

    def _share_prompt(self, each: Request) -> None:
        """Lets those go on that wait for a prompt, which is computed."""
        followers = self._followers.pop(each.number)
        prefix = SharedPrompt(list(each.digests), len(followers))
        for follower in followers:
            follower.prefix = prefix
        self._waiting.extendleft(reversed(followers))

    def _hand_over(self, each: Request) -> None:
        """Lets another sequence compute a prompt, where the one that was to has been aborted."""
        followers = self._followers.pop(each.number, None)
        if followers is None:
            return
        first, *rest = followers
        self._waiting.appendleft(first)
        if rest:
            self._followers[first.number] = rest
        else:
            self._cache.let_go(each.digests)

    def _let_go(self, leader: int) -> None:
        """Notes that nobody waits any more for a sequence's prompt."""
        del self._followers[leader]
        for each in (*self._waiting, *self._running):
            if each.number == leader:
                self._cache.let_go(each.digests)

    def _leave_prefix(self, each: Request) -> None:
        """Notes that a sequence waits no more for the blocks of its prompt."""
        prefix, each.prefix = each.prefix, None
        if prefix is not None:
            prefix.waiting -= 1
            if not prefix.waiting:
                self._cache.let_go(prefix.digests)

    def _append(self, each: Request, token: int) -> TokenUpdate:
        """Adds a token to an answer, and ends it if it was its last."""
        each.tokens.append(token)
        finish = each.finish
        if finish:
            self._end(each)
        return TokenUpdate(each.number, token, finish)

    def _feed(self, each: Request, count: int, admitted: bool) -> ScheduledTokens:
        """Gives a sequence the blocks of its next tokens."""
        known = 0 if admitted else len(each.blocks)
        self._add_blocks(each, count)
        each.fed = count
        samples = each.computed + count == len(each.tokens)
        new = tuple(each.blocks[known:])
        return ScheduledTokens(each.number, each.computed, count, samples, new, admitted)

    def _blocks_missing(self, each: Request, count: int) -> int:
        return -(-(each.computed + count) // self._block_size) - len(each.blocks)

    def _available(self) -> int:
        """Blocks that new tokens can be given."""
        return sum(self._cache.available(rank) for rank in self._computing)

    def _has_blocks(self, each: Request, count: int) -> bool:
        return self._blocks_missing(each, count) <= self._available()

    def _long(self) -> list[Request]:
        """Running sequences whose blocks lie on several ranks."""
        return [each for each in self._running if len(each.tokens) >= self._limits.short]

    def _just_computed(self) -> Iterator[Request]:
        """Long sequences whose prompts are computed since this was last asked."""
        for each in self._long():
            if each.computed >= each.prompt and not each.evened_out:
                each.evened_out = True
                yield each

    def _make_room(self, each: Request, count: int, moves: list[BlockTransfer]) -> int:
        """Moves blocks to ranks without weights where that lets a sequence be fed.

        Returns:
            Tokens that it can be fed, at most `count`, and at least 1, for which others may have to
            give up their blocks.
        """
        missing = self._blocks_missing(each, count) - self._available()
        if not self._limits.servers or missing <= 0:
            return count
        long = self._long()
        short = [other for other in self._running if len(other.tokens) < self._limits.short]
        moves += self._mover.make_room([*long, *short], missing)
        fits = (len(each.blocks) + self._available()) * self._block_size - each.computed
        return max(min(count, fits), 1)

    def _add_blocks(self, each: Request, count: int) -> None:
        """Adds blocks, on the ranks that should own them or, where these are full, on others."""
        missing = self._blocks_missing(each, count)
        for rank in self._in_chain(each, count, missing) or self._owners(each, missing):
            if not self._cache.available(rank):
                rank = max(self._computing, key=self._cache.available)
            each.blocks.append(self._cache.take(rank))

    def _owners(self, each: Request, count: int) -> list[int]:
        """Ranks that should own so many blocks that a feed adds, so that all have as many."""
        ranks = len(self._computing)
        if len(each.tokens) < self._limits.short or not count:
            return [each.home] * count
        if each.computed >= each.prompt:
            blocks = len(each.blocks) + np.arange(count)
            stripes = blocks * self._block_size // self._limits.stripe
            return [*map(int, (stripes + each.number) % ranks)]
        part = np.arange(count) * 2 * ranks // count
        owners = np.minimum(part, 2 * ranks - 1 - part)
        if count % (2 * ranks):
            held = np.bincount([block.rank for block in each.blocks], minlength=ranks)[:ranks]
            more = np.bincount(owners, minlength=ranks)
            owners += min(range(ranks), key=lambda by: int(np.ptp(held + np.roll(more, by))))
        return [*map(int, owners % ranks)]

    def _in_chain(self, each: Request, count: int, blocks: int) -> list[int]:
        """Ranks of the blocks that a chunk adds, by the chain or the levels, if it has any."""
        long = each.chain is not None or len(each.tokens) >= self._limits.short
        chain = each.chain or self._limits.chain
        if chain is None or not long or each.computed >= each.prompt:
            return []
        return chain.owners(blocks, each.computed, each.computed + count)

    def _choose_home(self, each: Request) -> int:
        """Rank that holds most of a sequence already, else one with few others and much room."""
        held = [block.rank for block in each.blocks]
        others = [other.home for other in self._running if other is not each]
        return min(
            self._computing,
            key=lambda rank: (
                -held.count(rank),
                others.count(rank),
                -self._cache.available(rank),
                rank,
            ),
        )

    def _extend_digests(self, each: Request) -> None:
        salt = self._sparse_salt if is_long(each.prompt, self._limits) else self._salt
        each.digests = extend_digests(each.digests, each.tokens, self._block_size, salt)

    def _look_up(self, each: Request) -> None:
        """Finds the blocks of a sequence's longest prefix; its last token is always computed."""
        self._extend_digests(each)
        full = 0 if each.scored else (len(each.tokens) - 1) // self._block_size
        waited = each.prefix is not None or each.number in self._followers
        each.blocks = self._cache.find(each.digests[:full], waited)
        each.computed = len(each.blocks) * self._block_size

    def _preempt(self, each: Request) -> None:
        self._running.remove(each)
        self._give_back(each)
        each.preempted += 1
        self.preemptions += 1
        self._waiting.appendleft(each)

    def _end(self, each: Request) -> None:
        self._running.remove(each)
        self._give_back(each)

    def _give_back(self, each: Request) -> None:
        self._cache.release(each.blocks)
        each.blocks, each.settled, each.evened_out = [], 0, False
