"""The scheduler of a serving engine: which tokens of which sequences the next iteration feeds.

A pure function of what it was told, so that a simulator can run it as an engine does. An iteration
feeds chunks of prompts and decoded tokens together, up to a number of tokens. Sequences that wait
are admitted in the order of their arrival; if there are no blocks for one that runs, the youngest
gives up its own and is computed again later, of which the prefix cache may still have most.

Blocks of a short sequence lie on one rank, its *home*, which computes it without any exchange. Of a
long one, each chunk's blocks are shared out in zigzag, and decoded ones in stripes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distca.schedule.serving.prefix_cache import Block, PrefixCache, extend_digests

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Limits:
    """Bounds and rules of a scheduler.

    Attributes:
        sequences: most sequences that run at a time.
        tokens: most tokens that an iteration feeds.
        stripe: consecutive decoded positions of a long sequence that one rank owns; a multiple of
            the blocks' size.
        short: tokens below which a sequence is short.

    Raises:
        ValueError: the limits contradict each other.
    """

    sequences: int
    tokens: int
    stripe: int
    short: int

    def __post_init__(self) -> None:
        if self.tokens < self.sequences:
            raise ValueError(
                f"an iteration of {self.tokens} tokens cannot feed one of each of {self.sequences} "
                "sequences: raise --max-num-batched-tokens, or lower --max-num-seqs"
            )


@dataclass
class ServedSequence:
    """A sequence from its arrival to its end.

    Attributes:
        number: number, by which the engine knows it.
        tokens: prompt, and the answer so far.
        prompt: tokens of the prompt.
        most: most tokens of prompt and answer.
        stops: tokens that end the answer.
        fewest: fewest tokens of prompt and answer that `stops` may end.
        computed: tokens whose keys and values its blocks hold.
        found: tokens of these that it did not compute itself when it was admitted last.
        blocks: its blocks, in the order of positions.
        digests: digests of its full blocks as far as they are known.
        home: rank of a short sequence.
        fed: tokens that the iteration under way feeds.
        preempted: times that it gave up its blocks.
    """

    number: int
    tokens: list[int]
    prompt: int
    most: int
    stops: frozenset[int]
    fewest: int = 0
    computed: int = 0
    found: int = 0
    blocks: list[Block] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    home: int = 0
    fed: int = 0
    preempted: int = 0


@dataclass(frozen=True)
class Feed:
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
class Batch:
    """An iteration.

    Attributes:
        feeds: what is fed, the oldest sequence first.
        preempted: sequences that gave up their blocks, and wait again.
    """

    feeds: tuple[Feed, ...]
    preempted: tuple[int, ...]


@dataclass(frozen=True)
class Advance:
    """What an iteration brought a sequence.

    Attributes:
        sequence: number of the sequence.
        token: token that was chosen.
        finish: why the answer has ended; None: it goes on.
    """

    sequence: int
    token: int
    finish: FinishReason | None


class Scheduler:
    """Sequences that wait and run, and their blocks.

    Args:
        cache: blocks of all ranks.
        limits: bounds and rules.
        salt: what keys and values depend on beside tokens: the model.

    Attributes:
        preemptions: times that a sequence gave up its blocks.
        looked_up: tokens of admitted sequences that were looked up in the prefix cache.
        found: tokens of these that it had.
    """

    def __init__(self, cache: PrefixCache, limits: Limits, salt: bytes = b"") -> None:
        self._cache, self._limits, self._salt = cache, limits, salt
        self._block_size, self._world_size = cache.pool.block_size, cache.pool.world_size
        self._waiting: deque[ServedSequence] = deque()
        self._running: list[ServedSequence] = []
        self._aborted: set[int] = set()
        self.preemptions = self.looked_up = self.found = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

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
    ) -> None:
        """Adds a sequence.

        Args:
            number: a number that no other sequence has.
            tokens: prompt, at least one token.
            most_new: most tokens of the answer, at least one.
            stops: tokens that end the answer.
            fewest_new: fewest tokens of an answer that they may end.

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
        self._waiting.append(ServedSequence(number, prompt, len(prompt), most, stops, fewest))

    def abort(self, number: int) -> bool:
        """Ends a sequence in whatever state it is; returns whether there was one.

        What an iteration under way computes of it is given back once that has ended.
        """
        for each in self._waiting:
            if each.number == number:
                self._waiting.remove(each)
                return True
        for each in self._running:
            if each.number == number and number not in self._aborted:
                if each.fed:
                    self._aborted.add(number)
                else:
                    self._end(each)
                return True
        return False

    def schedule(self) -> Batch | None:
        """Decides what the next iteration feeds; None if there is nothing.

        The iteration has to be told of by `advance` before the next is asked for.
        """
        assert not any(each.fed for each in self._running), "an iteration is under way"
        feeds: list[Feed] = []
        preempted: list[int] = []
        left = self._limits.tokens
        number = 0
        while number < len(self._running) and left:
            each = self._running[number]
            # Every sequence after this one gets a token at least.
            others = len(self._running) - number - 1
            count = min(len(each.tokens) - each.computed, max(left - others, 1))
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
            if not self._has_blocks(each, count):
                self._give_back(each)
                break
            self._waiting.popleft()
            self._running.append(each)
            self.looked_up += len(each.tokens)
            self.found += each.found
            each.home = self._choose_home(each)
            feeds.append(self._feed(each, count, admitted=True))
            left -= count
        return Batch(tuple(feeds), tuple(preempted)) if feeds else None

    def advance(self, batch: Batch, chosen: Mapping[int, int]) -> list[Advance]:
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
                continue
            before = each.computed // self._block_size
            each.computed += feed.count
            each.digests = extend_digests(each.digests, each.tokens, self._block_size, self._salt)
            for full in range(before, each.computed // self._block_size):
                self._cache.keep(each.blocks[full], each.digests[full])
            if feed.samples:
                advances.append(self._append(each, chosen[each.number]))
        return advances

    def computed(self, number: int) -> int:
        """Tokens of a running sequence whose keys and values are held."""
        return next(each.computed for each in self._running if each.number == number)

    def _append(self, each: ServedSequence, token: int) -> Advance:
        """Adds a token to an answer, and ends it if it was its last."""
        each.tokens.append(token)
        finish: FinishReason | None = None
        if token in each.stops and len(each.tokens) > each.fewest:
            finish = "stop"
        elif len(each.tokens) == each.most:
            finish = "length"
        if finish:
            self._end(each)
        return Advance(each.number, token, finish)

    def _feed(self, each: ServedSequence, count: int, admitted: bool) -> Feed:
        """Gives a sequence the blocks of its next tokens."""
        known = 0 if admitted else len(each.blocks)
        self._add_blocks(each, count)
        each.fed = count
        samples = each.computed + count == len(each.tokens)
        new = tuple(each.blocks[known:])
        return Feed(each.number, each.computed, count, samples, new, admitted)

    def _blocks_missing(self, each: ServedSequence, count: int) -> int:
        return -(-(each.computed + count) // self._block_size) - len(each.blocks)

    def _has_blocks(self, each: ServedSequence, count: int) -> bool:
        there = sum(self._cache.available(rank) for rank in range(self._world_size))
        return self._blocks_missing(each, count) <= there

    def _add_blocks(self, each: ServedSequence, count: int) -> None:
        """Adds blocks, on the ranks that should own them or, where these are full, on others."""
        first, missing = len(each.blocks), self._blocks_missing(each, count)
        for number in range(missing):
            rank = self._owner(each, first + number, number, missing)
            if not self._cache.available(rank):
                rank = max(range(self._world_size), key=self._cache.available)
            each.blocks.append(self._cache.take(rank))

    def _owner(self, each: ServedSequence, block: int, number: int, count: int) -> int:
        """Rank that should own a block, the `number`th of `count` that a feed adds."""
        if len(each.tokens) < self._limits.short:
            return each.home
        if each.computed >= each.prompt:
            stripe = block * self._block_size // self._limits.stripe
            return (stripe + each.number) % self._world_size
        part = number * 2 * self._world_size // count
        return min(part, 2 * self._world_size - 1 - part)

    def _choose_home(self, each: ServedSequence) -> int:
        """Rank that holds most of a sequence already, else one with few others and much room."""
        held = [block.rank for block in each.blocks]
        others = [other.home for other in self._running if other is not each]
        return min(
            range(self._world_size),
            key=lambda rank: (
                -held.count(rank),
                others.count(rank),
                -self._cache.available(rank),
                rank,
            ),
        )

    def _look_up(self, each: ServedSequence) -> None:
        """Finds the blocks of a sequence's longest prefix; its last token is always computed."""
        each.digests = extend_digests(each.digests, each.tokens, self._block_size, self._salt)
        full = (len(each.tokens) - 1) // self._block_size
        each.blocks = self._cache.find(each.digests[:full])
        each.found = each.computed = len(each.blocks) * self._block_size

    def _preempt(self, each: ServedSequence) -> None:
        self._running.remove(each)
        self._give_back(each)
        each.preempted += 1
        self.preemptions += 1
        self._waiting.appendleft(each)

    def _end(self, each: ServedSequence) -> None:
        self._running.remove(each)
        self._give_back(each)

    def _give_back(self, each: ServedSequence) -> None:
        self._cache.release(each.blocks)
        each.blocks = []
        each.computed = each.found = 0
