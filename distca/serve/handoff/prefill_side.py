"""Prefill ranks as the engine knows them: chunks in line, their blocks, and the sending side.

A step is numbered when it begins, once all ranks of its group have come to it. So the groups of
steps that run at a time share no rank, and every rank's steps come in rising order.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distca.inference.messages import NewRequest, SampledToken
from distca.schedule.serving.cdsp import PrefillQueue, PrefillTimes, Sender, send
from distca.schedule.serving.cdsp import handoff as hand
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.handoff import Transfer
from distca.schedule.serving.cdsp.lines import Lines
from distca.schedule.serving.cdsp.prefill_blocks import Piece, PrefillBlocks, cut_at_blocks
from distca.schedule.serving.iteration import BatchEntry
from distca.schedule.serving.prefix_cache import PrefixCache
from distca.serve.engine.plan_history import PlanHistory
from distca.serve.handoff.messages import (
    ChunkDone,
    Forget,
    HandoffEvent,
    LayerDone,
    RunChunk,
    Ship,
    event_of,
    tell,
)
from distca.serve.handoff.settings import sequence_of

Post = Callable[[int, Any], None]
"""Sends a message to a process."""


@dataclass
class _Prefill:
    """A try of a request on the prefill ranks.

    Attributes:
        transfer: request and epoch.
        admit: what its first token is chosen by; its tokens are fed.
        digests: what its full blocks are found by.
        pieces: its chunks; tokens before the first one are cached.
        leader: process that it is handed over to.
        decode: number of that decode rank.
        computed: tokens whose keys and values prefill ranks have.
        jobs: its chunks in line.
        step: number of its latest step.
        known: ranks that were told of it.
        freed: whether the hand-off has ended, and its blocks are free once no step runs.
    """

    transfer: Transfer
    admit: NewRequest
    digests: Sequence[bytes]
    pieces: Sequence[Piece]
    leader: int
    decode: int
    computed: int
    jobs: list[_Job] = field(default_factory=list)
    step: int = -1
    known: set[int] = field(default_factory=set)
    freed: bool = False


@dataclass(eq=False)
class _Job:
    """A chunk in line on its ranks.

    Attributes:
        prefill: whose chunk it is.
        chunk: its number among the prompt's.
        seconds: seconds that it is expected to take.
        begun: time at which it began; None: it has not.
        layers: ranks that have computed each layer.
        done: what ranks said at its end.
    """

    prefill: _Prefill
    chunk: int
    seconds: float
    begun: float | None = None
    layers: Counter[int] = field(default_factory=Counter)
    done: list[ChunkDone] = field(default_factory=list)

    @property
    def piece(self) -> Piece:
        """Its positions and ranks."""
        return self.prefill.pieces[self.chunk]

    @property
    def ranks(self) -> Ranks:
        """Members of its group."""
        return self.piece.ranks


@dataclass(frozen=True)
class Ended:
    """A try whose hand-off has ended on the prefill side: why; empty where all was received."""

    transfer: Transfer
    reason: str


@dataclass(frozen=True)
class Prefilled:
    """The token that a prefill gave."""

    transfer: Transfer
    chosen: SampledToken


@dataclass
class PrefillCounts:
    """What prefill ranks have done: steps, tokens, bytes and seconds; tokens found, and sought."""

    steps: int = 0
    tokens: int = 0
    found: int = 0
    sought: int = 0
    bytes_sent: int = 0
    bytes_moved: int = 0
    plan_seconds: float = 0.0
    seconds: float = 0.0


class PrefillSide:
    """Prompts on the prefill ranks, until they are handed over.

    Args:
        queue: planner of prefills.
        times: seconds of a prefill.
        cache: blocks of the ranks, and those of prefixes that are kept.
        layers: layers of the model.
        lease: seconds without a word after which a decode rank counts as dead.
        post: function that sends a message to a process.
        plans: plans that can be shown.

    Attributes:
        counts: what was done so far.
        said: what has become of tries, for the engine to take.
    """

    def __init__(
        self,
        queue: PrefillQueue,
        times: PrefillTimes,
        cache: PrefixCache,
        layers: int,
        lease: float,
        post: Post,
        plans: PlanHistory,
    ) -> None:
        self._queue, self._times, self._layers, self._post = queue, times, layers, post
        self._size, self._cache, self._blocks = cache.pool.block_size, cache, PrefillBlocks(cache)
        self._lines: Lines[_Job] = Lines(cache.pool.world_size)
        self._sender, self._plans = Sender(lease), plans
        self._prefills: dict[Transfer, _Prefill] = {}
        self._steps: dict[int, _Job] = {}
        self._numbers = itertools.count()
        self.counts = PrefillCounts()
        self.said: list[Ended | Prefilled] = []

    @property
    def oldest_step(self) -> float | None:
        """Time at which the step began that has run the longest; None: none runs."""
        return min((job.begun for job in self._steps.values() if job.begun), default=None)

    def begin(
        self,
        transfer: Transfer,
        admit: NewRequest,
        digests: Sequence[bytes],
        leader: int,
        decode: int,
        blocks: int,
    ) -> hand.Begin | None:
        """Plans a prompt and puts its chunks in line, if there are blocks for it.

        Args:
            transfer: request and epoch.
            admit: what its first token is chosen by; its tokens are fed.
            digests: what its full blocks are found by.
            leader: process that it is handed over to.
            decode: number of that decode rank.
            blocks: blocks that the decode rank needs.

        Returns:
            What the decode rank must be told.

        Raises:
            ValueError: no group of ranks can hold it.
        """
        now = time.monotonic()
        self._queue.free_at = self._free_at(now)
        # The last token is fed in any case: the one that follows is chosen by it.
        count = len(admit.tokens)
        found = self._cache.find(digests[: (count - 1) // self._size])
        cached, holders = len(found) * self._size, frozenset(block.rank for block in found)
        plan = self._queue.plan(now, count - cached, cached, holders)
        if not plan.chunks[0].cached:
            self._cache.release(found)
            found = []
        pieces = cut_at_blocks(plan.chunks, self._size)
        if not self._blocks.reserve(sequence_of(transfer), pieces, found):
            self._cache.release(found)
            return None
        cached = pieces[0].start
        self.counts.found += cached
        self.counts.sought += count
        prefill = _Prefill(transfer, admit, digests, pieces, leader, decode, cached)
        self._prefills[transfer] = prefill
        begin = hand.Begin(transfer, len(pieces), self._layers, blocks)
        self._apply(begin)
        for chunk, piece in enumerate(pieces):
            seconds = self._times.seconds(len(piece.ranks), piece.start, piece.end - piece.start)
            prefill.jobs.append(_Job(prefill, chunk, seconds))
            self._lines.add(prefill.jobs[-1])
        return begin

    def cached(self, transfer: Transfer) -> int:
        """Tokens of a prompt that were cached."""
        return self._prefills[transfer].pieces[0].start

    def dispatch(self, transfer: Transfer) -> None:
        """Begins the chunks of a prompt that need not wait."""
        self._dispatch(list(self._prefills[transfer].jobs))

    def cancel(self, transfer: Transfer) -> None:
        """Ends a try, in whatever state it is."""
        self._apply(hand.Cancel(transfer))

    def tick(self) -> None:
        """Lets time pass for the sending side."""
        self._apply(hand.Tick())

    def hear(self, message: Any) -> None:
        """Takes a message of a prefill rank, or an event of a decode rank."""
        if isinstance(message, HandoffEvent):
            self._apply(event_of(message), message.rank)
            return
        job = self._steps[message.number]
        if isinstance(message, LayerDone):
            job.layers[message.layer] += 1
            if job.layers[message.layer] == len(job.ranks):
                self._apply(hand.Computed(job.prefill.transfer, job.chunk, message.layer))
            return
        assert isinstance(message, ChunkDone)
        job.done.append(message)
        if len(job.done) == len(job.ranks):
            del self._steps[message.number]
            self._end(job)

    def _free_at(self, now: float) -> list[float]:
        """When each rank will have done what is in its line."""
        free: dict[int, float] = {}
        for job in self._lines:
            left = job.seconds - (0.0 if job.begun is None else now - job.begun)
            end = max([free.get(rank, now) for rank in job.ranks]) + max(left, 0.0)
            free.update(dict.fromkeys(job.ranks, end))
        return [free.get(rank, now) for rank in range(len(self._queue.free_at))]

    # Steps.

    def _dispatch(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if job.begun is None and self._lines.is_next(job):
                self._run(job)

    def _run(self, job: _Job) -> None:
        prefill, piece, number = job.prefill, job.piece, next(self._numbers)
        sequence = sequence_of(prefill.transfer)
        given = self._blocks.begin(sequence, piece)
        job.begun, prefill.step, self._steps[number] = time.monotonic(), number, job
        tokens = prefill.admit.tokens
        last = piece.end == len(tokens)
        owners = [block.rank for block in given.blocks]
        request, count = prefill.transfer.request, piece.end - piece.start
        if count > 1 or not piece.start:
            part = BatchEntry(request, piece.start, count, np.array(owners, dtype=np.int64))
            self._plans.keep([request], (part,))
        for rank in piece.ranks:
            chooses = last and rank == given.blocks[-1].rank
            self._post(
                rank,
                RunChunk(
                    number,
                    sequence,
                    piece.start,
                    tokens[piece.start : piece.end],
                    owners,
                    [block.number for block in given.blocks],
                    [(*move.source, *move.to) for move in given.moves],
                    prefill.admit if chooses else None,
                ),
            )
            prefill.known.add(rank)
        self._apply(hand.Dispatched(prefill.transfer, job.chunk))

    def _end(self, job: _Job) -> None:
        """Ends a step, and begins those that waited for its ranks."""
        counts, prefill = self.counts, job.prefill
        counts.steps += 1
        counts.tokens += job.piece.end - job.piece.start
        counts.bytes_sent += sum(each.bytes_sent for each in job.done)
        counts.bytes_moved += sum(each.bytes_moved for each in job.done)
        counts.plan_seconds += max(each.plan_seconds for each in job.done)
        counts.seconds += max(each.seconds for each in job.done)
        prefill.computed = job.piece.end
        prefill.jobs.remove(job)
        following = self._lines.remove([job])
        chosen = [each.chosen for each in job.done if each.chosen is not None]
        if chosen:
            self.said.append(Prefilled(prefill.transfer, chosen[0]))
        if prefill.freed:
            self._release(prefill)
        self._dispatch(following)

    # The hand-off.

    def _apply(self, event: Any, told_by: int = 0) -> None:
        """Applies an event to the sending side, and does what it asks for.

        Args:
            event: an event of its own, or a message from a decode rank.
            told_by: process that an answer goes to, where its try is over here.
        """
        self._sender, actions = send(self._sender, event, time.monotonic())
        for action in actions:
            match action:
                case hand.Send(message):
                    prefill = self._prefills.get(message.transfer)
                    self._post(told_by if prefill is None else prefill.leader, tell(message))
                case hand.Write():
                    self._write(action)
                case hand.Fence(transfer):
                    # Ranks read what is asked for in order, so nothing is read once they forget.
                    self._apply(hand.Fenced(transfer))
                case hand.Free(transfer, _, reason):
                    self._free(self._prefills[transfer], reason)

    def _write(self, write: hand.Write) -> None:
        """Asks the ranks that hold a chunk's rows to send a layer of them."""
        prefill = self._prefills[write.transfer]
        sequence, piece = sequence_of(write.transfer), prefill.pieces[write.chunk]
        # What was cached goes with the first chunk.
        start = piece.start if write.chunk else 0
        blocks = self._blocks.blocks(sequence)[start // self._size : -(-piece.end // self._size)]
        ship = Ship(
            prefill.step,
            sequence,
            write.transfer,
            write.chunk,
            write.layer,
            start,
            piece.end,
            prefill.decode,
        )
        for rank in {block.rank for block in blocks}:
            self._post(rank, ship)

    def _free(self, prefill: _Prefill, reason: str) -> None:
        prefill.freed = True
        left = [job for job in prefill.jobs if job.begun is None]
        prefill.jobs = [job for job in prefill.jobs if job.begun is not None]
        following = self._lines.remove(left)
        self.said.append(Ended(prefill.transfer, reason))
        if not prefill.jobs:
            self._release(prefill)
        self._dispatch(following)

    def _release(self, prefill: _Prefill) -> None:
        """Gives the blocks of a prompt back, once no step of it runs."""
        sequence = sequence_of(prefill.transfer)
        self._blocks.release(sequence, prefill.digests[: prefill.computed // self._size])
        for rank in prefill.known:
            self._post(rank, Forget(sequence))
        del self._prefills[prefill.transfer]
