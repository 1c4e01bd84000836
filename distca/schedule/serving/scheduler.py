"""The scheduler of a serving engine: which sequences' tokens the next iteration feeds.

A simulator runs it, too. An iteration feeds chunks of prompts and decoded tokens together, up to a
number of tokens. Sequences that wait are admitted by priority, and then in the order of their
arrival. If there are no blocks for one that runs, the youngest sequence of the lowest priority is
preempted: it gives up its blocks and is computed again. The prefix cache may have most of them.

A prompt may be computed for someone else, who answers it: no token is chosen, its blocks are held
until `abort` releases them, and it is admitted once there are blocks for all of it. One prompt's
answers share what is computed of it: one of them leads, and the others wait until it has computed
the prompt, and then find its blocks in the prefix cache.

The rank that owns a block computes its tokens. Blocks of a short sequence lie on one rank, its
*home*, which computes it alone. Each chunk's blocks of a long one are shared out in zigzag, and
decoded ones in stripes. An answer may make a short sequence long. A chain cuts a chunk between
blocks, so that others find them. With growing groups a long sequence has more and more own ranks.
With equal shares each home is fed as many tokens as the others (`home_shares.py`).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Mapping

from distca.schedule.serving.block_owners import BlockOwners
from distca.schedule.serving.blocks import PrefixCache, SequenceBlocks, extend_digests
from distca.schedule.serving.growing_groups import GroupGiver, grown
from distca.schedule.serving.home_shares import HomeShares
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.moves import BlockTransfer, Mover, join_moves
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import ScheduledTokens, SchedulerOutput, TokenUpdate

MOST_SCORED = 256
"""Tokens of prompts that are scored, of an iteration: each has logits of the whole vocabulary."""


class Scheduler:
    """Sequences that wait and run, and their blocks.

    Args:
        cache: blocks of all ranks.
        limits: bounds and rules.
        salt: what keys and values depend on beside tokens: the model.
        sparse_salt: that of sequences of long prompts, whose chunks may drop rows; None: the same.

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
        self._owners = BlockOwners(cache, self._computing, limits)
        self._groups = (
            None
            if limits.growing is None
            else GroupGiver(cache, len(self._computing), limits, limits.growing)
        )
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        # Prompts that are computed, and whose blocks others read until they are aborted.
        self._held: dict[int, Request] = {}
        self._aborted: set[int] = set()
        # Preempted sequences that no iteration has announced yet.
        self._preempted: list[int] = []
        # Sequences that wait until another has computed the prompt that they share, by its number.
        self._followers: dict[int, list[Request]] = {}
        # Prompts of several answers, which share their blocks with no other prompt.
        self._families = 0
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
    def held(self) -> int:
        """Prompts that are computed, and whose blocks are held until they are aborted."""
        return len(self._held)

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence whose keys and values all ranks' pools can hold."""
        return self._cache.pool.blocks_per_rank * self._world_size * self._block_size

    def add(self, each: Request) -> None:
        """Adds a sequence, which says how far it is until it ends.

        Raises:
            ValueError: its keys and values could never be held.
        """
        # The last token of an answer is never fed.
        fed = each.prompt + max(each.most_new - 1, 0)
        # A prompt that is held has all its blocks at once, and new ones lie where ranks compute.
        ranks = len(self._computing) if each.holds else self._world_size
        room = self.capacity // self._world_size * ranks
        if fed > room:
            raise ValueError(
                f"{fed:,} tokens need more than the {room:,} whose keys and values "
                "the ranks can hold: shorten the prompt, ask for fewer tokens, or raise "
                "--kv-cache-memory-bytes"
            )
        each.block_size = self._block_size
        if self._groups is not None:
            self._groups.arrived(each.arrived)
        if each.leader is not None:
            self._followers.setdefault(each.leader, []).append(each)
            return
        if each.number in self._followers and not self._limits.prefix_caching:
            # Nobody but the answers to this prompt finds its blocks.
            self._families += 1
            each.salt += self._families.to_bytes(8)
        self._wait(each)

    def abort(self, number: int) -> bool:
        """Ends a sequence in whatever state it is; returns whether there was one.

        What an iteration under way computes of it is given back once that has ended.
        """
        for each in self._waiting:
            if each.number == number:
                self._waiting.remove(each)
                self._preempted = [other for other in self._preempted if other != number]
                self._hand_over(each)
                return True
        if number in self._held:
            self._give_back(self._held.pop(number))
            return True
        for leader, followers in self._followers.items():
            for each in followers:
                if each.number == number:
                    followers.remove(each)
                    if not followers:
                        del self._followers[leader]
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

        Call `advance` with the iteration's result before asking for the next.
        """
        assert not any(each.fed for each in self._running), "an iteration is under way"
        feeds: list[ScheduledTokens] = []
        preempted: list[int] = []
        moves = self._moves()
        shares = None
        if self._limits.equal_shares:
            shares = HomeShares(self._cache, self._computing, self._limits, self._running)
        left, scored = self._limits.max_num_batched_tokens, MOST_SCORED
        number = 0
        while number < len(self._running) and left:
            each = self._running[number]
            # Every sequence after this one gets a token at least.
            others = len(self._running) - number - 1
            count = min(self._next_tokens(each), max(left - others, 1))
            if shares is not None:
                count = min(count, shares.most(each))
            if each.scored:
                count = min(count, scored)
                scored -= count
            if not count:
                number += 1
                continue
            if not preempted and self._limits.servers:
                count = self._make_room(each, count, moves)
            while not self._has_blocks(each, count):
                victim = self._victim(number)
                self._preempt(victim)
                preempted.append(victim.number)
                if victim is each:
                    break
            else:
                if shares is not None:
                    shares.feed(each, count)
                feeds.append(self._feed(each, count, admitted=False))
                left -= count
                number += 1
        while self._waiting and left and not preempted:
            if len(self._running) == self._limits.max_num_seqs:
                break
            each = self._waiting[0]
            self._look_up(each)
            if self._groups is not None:
                self._groups.give(each, self._running)
            count = min(self._next_tokens(each), left)
            if shares is not None:
                count = min(count, shares.admit(each))
            if each.scored:
                count = min(count, scored)
                scored -= count
            if count and self._limits.servers:
                count = self._make_room(each, count, moves)
            # Nobody takes the blocks of a prompt that is held, so it must have all that it needs.
            most = len(each.tokens) - each.computed if each.holds else count
            if not count or not self._has_blocks(each, most):
                self._give_back(each)
                break
            self._waiting.popleft()
            self._running.append(each)
            self.looked_up += len(each.tokens)
            self.found += each.computed
            if shares is None:
                homes = [other.home for other in self._running if other is not each]
                each.home = self._owners.home(each, homes)
            else:
                shares.admitted(each, count)
            feeds.append(self._feed(each, count, admitted=True))
            left -= count
        self._preempted += preempted
        if feeds or moves:
            preempted, self._preempted = self._preempted, []
            moved = join_moves(moves) if moves else ()
            return SchedulerOutput(tuple(feeds), tuple(preempted), moved)
        # Whoever was preempted may have made room for another.
        return self.schedule() if preempted else None

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
            before = each.full
            each.computed += feed.count
            leads = each.number in self._followers
            if each.full > before and (self._limits.prefix_caching or leads):
                self._extend_digests(each)
                for full in range(before, each.full):
                    self._cache.keep(each.blocks[full], each.digests[full])
            if each.holds and each.computed == len(each.tokens):
                self._running.remove(each)
                self._held[each.number] = each
            if feed.samples:
                each.scored = False
                if leads:
                    self._share_prompt(each)
                advances.append(self._append(each, chosen[each.number]))
        return advances

    def _share_prompt(self, each: Request) -> None:
        """Lets those go on that wait for a prompt, which is computed."""
        for follower in reversed(self._followers.pop(each.number)):
            follower.salt = each.salt
            self._wait(follower, first=True)

    def _hand_over(self, each: Request) -> None:
        """Lets another sequence compute a prompt, where the one that was to has been aborted."""
        followers = self._followers.pop(each.number, [])
        if followers:
            first, *rest = followers
            first.salt = each.salt
            self._wait(first, first=True)
            if rest:
                self._followers[first.number] = rest

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
        if self._groups is not None:
            self._groups.feed(each, count)
        self._add_blocks(each, count)
        each.fed = count
        samples = not each.holds and each.computed + count == len(each.tokens)
        new = tuple(each.blocks[known:])
        dense, ranks = self._is_dense(each), each.blocks.ranks
        return ScheduledTokens(
            each.number, each.computed, count, ranks, dense, samples, new, admitted
        )

    def _is_dense(self, each: Request) -> bool:
        """Whether nothing is dropped of a sequence: its prompt is short, its answer may be long."""
        return each.prompt < self._limits.threshold

    def _next_tokens(self, each: Request) -> int:
        """Tokens that a sequence can be fed next: at most its chunk, and what the chunk's ranks can
        still be fed, if it has chunks."""
        if self._groups is None or not each.left:
            return len(each.tokens) - each.computed
        return min(each.left[0].end - each.computed, self._groups.most(each))

    def _blocks_missing(self, each: Request, count: int) -> int:
        return -(-(each.computed + count) // self._block_size) - len(each.blocks)

    def _available(self) -> int:
        """Blocks that new tokens can be given."""
        return sum(self._cache.available(rank) for rank in self._computing)

    def _has_blocks(self, each: Request, count: int) -> bool:
        missing = self._blocks_missing(each, count)
        # Most decoded tokens need none.
        return missing <= 0 or missing <= self._available() - self._promised(each)

    def _promised(self, each: Request) -> int:
        """Blocks that prompts which run for others than this sequence will still need."""
        return sum(
            self._blocks_missing(other, len(other.tokens) - other.computed)
            for other in self._running
            if other.holds and other is not each
        )

    def _long(self) -> list[Request]:
        """Running sequences whose blocks lie on several ranks."""
        return [each for each in self._running if len(each.tokens) >= self._limits.threshold]

    def _moves(self) -> list[BlockTransfer]:
        """Begins the moves of an iteration: of blocks that are full, and of new ranks."""
        moves = self._mover.settle(self._long()) if self._limits.servers else []
        if self._limits.evens_out:
            moves += self._mover.even_out(self._just_computed())
        if self._groups is not None:
            self._groups.begin()
            for each, group in grown(self._running):
                moves += self._mover.even_out([each], group)
        return moves

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
        if missing <= 0:
            return count
        long = self._long()
        short = [other for other in self._running if len(other.tokens) < self._limits.threshold]
        # One that waits has the blocks that were found of it, maybe all that there are.
        waits = [] if each in self._running else [each]
        moves += self._mover.make_room([*long, *short, *waits], missing)
        fits = (len(each.blocks) + self._available()) * self._block_size - each.computed
        return max(min(count, fits), 1)

    def _add_blocks(self, each: Request, count: int) -> None:
        """Adds blocks, on the ranks that should own them or, where these are full, on others."""
        missing = self._blocks_missing(each, count)
        if not missing:
            # As for most decoded tokens.
            return
        new = []
        for rank in self._owners.of_new_blocks(each, count, missing):
            if not self._cache.available(rank):
                rank = max(self._computing, key=self._cache.available)
            new.append(self._cache.take(rank))
        each.blocks.extend(new)

    def _extend_digests(self, each: Request) -> None:
        salt = self._salt if self._is_dense(each) else self._sparse_salt
        salt += each.salt
        each.digests = extend_digests(each.digests, each.tokens, self._block_size, salt)

    def _look_up(self, each: Request) -> None:
        """Finds the blocks of a sequence's longest prefix; its last token is always computed."""
        answers = each.leader is not None or each.number in self._followers
        full = 0
        if not each.scored and (self._limits.prefix_caching or answers):
            self._extend_digests(each)
            full = (len(each.tokens) - 1) // self._block_size
        each.blocks = SequenceBlocks(self._cache.find(each.digests[:full]))
        each.computed = len(each.blocks) * self._block_size

    def _wait(self, each: Request, first: bool = False) -> None:
        """Puts a sequence in line, as the last of its priority or as its first."""
        before = bisect.bisect_left if first else bisect.bisect_right
        place = before(self._waiting, each.priority, key=lambda other: other.priority)
        self._waiting.insert(place, each)

    def _victim(self, number: int) -> Request:
        """Sequence that gives up its blocks for the one at `number` of those that run: the youngest
        of the last priority among this and later ones, but for prompts that hold theirs."""
        *_, victim = sorted(
            (each for each in self._running[number:] if not each.holds),
            key=lambda each: each.priority,
        )
        return victim

    def _preempt(self, each: Request) -> None:
        self._running.remove(each)
        self._give_back(each)
        self.preemptions += 1
        self._wait(each, first=True)

    def _end(self, each: Request) -> None:
        self._running.remove(each)
        self._give_back(each)

    def _give_back(self, each: Request) -> None:
        self._cache.release(each.blocks)
        each.blocks, each.pieces = SequenceBlocks(), ()
        each.settled, each.evened_out = 0, False
