"""Requests through both halves of a cluster: prefill, hand-off and decode, event by event.

The prefill ranks are an engine (`SimulatedEngine`): its scheduler admits prompts, gives them ranks
and blocks, and feeds them in iterations. Keys and values are handed over by the state machines of
`distca.schedule.serving.handoff`, whose messages take no time. A decode rank receives one
request for each of its backends at a time, each whole before one that came later. A chunk's layers
are sent during its computing from when its request has a backend, and the last one after it.

Decode ranks are no engine: they are what Tetris' paper has, in the place of vLLM. Our scheduler
cannot stand for them, since it takes no blocks for a prompt that others compute. A decode rank runs
iterations over all that were handed over by then. A request's decode blocks are those of its prompt
and its whole answer, so that nothing is preempted. If no decode rank has them, the request waits
before it goes to the prefill ranks.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from distca.schedule.serving.blocks import BlockPool, Blocks
from distca.schedule.serving.cdsp import ImprovementRates
from distca.schedule.serving.handoff import Receiver, Sender, receive, send
from distca.schedule.serving.handoff.protocol import (
    Action,
    Begin,
    Computed,
    Finish,
    Free,
    Landed,
    ReceiverEvent,
    Send,
    SenderEvent,
    Start,
    Started,
    Transfer,
    Write,
    Written,
)
from distca.simulate.requests.cluster import ServingCluster
from distca.simulate.requests.decode_ranks import DecodeRank, choose_decode_rank
from distca.simulate.requests.engine import SimulatedIteration
from distca.simulate.requests.prefills import EAGER, make_engine
from distca.simulate.requests.traces import RequestTrace


@dataclass(frozen=True)
class Served:
    """What became of each request, in the trace's order.

    Attributes:
        ttft: seconds from its arrival to its first token.
        per_token: seconds of each further token, from the first one on, on average; of answers of
            one token there are none.
        ranks: ranks that computed the end of its prompt.
    """

    ttft: list[float]
    per_token: list[float]
    ranks: list[int]


def serve(
    trace: RequestTrace, cluster: ServingCluster, strategy: str, rates: ImprovementRates = EAGER
) -> Served:
    """Simulates a trace.

    Raises:
        ValueError: a request is too long for the prefill ranks or for a decode rank.
    """
    return _Simulation(trace, cluster, strategy, rates).run()


@dataclass
class _Chunk:
    """A chunk of the hand-off.

    Attributes:
        tokens: tokens of it.
        ranks: ranks that compute it.
        started: time at which its computing begins.
        computed: time at which it is computed.
    """

    tokens: int
    ranks: int = 1
    started: float = math.inf
    computed: float = math.inf


@dataclass
class _Decoding:
    """A decode rank: its batch, as the iteration after which each request ends.

    Attributes:
        line: requests that are not all here. The first of them, as many as there are backends, may
            be sent.
    """

    receiver: Receiver
    line: list[int] = field(default_factory=list)
    ending: list[tuple[int, int]] = field(default_factory=list)
    joining: list[int] = field(default_factory=list)
    rows: int = 0
    used: int = 0
    virtual: int = 0
    iteration: int = 0
    running: bool = False


class _Simulation:
    def __init__(
        self, trace: RequestTrace, cluster: ServingCluster, strategy: str, rates: ImprovementRates
    ) -> None:
        self._cluster, self._requests = cluster, trace.requests
        self._engine = make_engine(cluster, strategy, rates)
        size = cluster.block_size
        self._decode_blocks = cluster.decode_tokens // size
        self._decode_pool = BlockPool(cluster.decode_ranks, self._decode_blocks, size)
        # In virtual time nobody is late: leases are long.
        self._sender = Sender(float("inf"))
        self._decoding = [_Decoding(Receiver(float("inf"))) for _ in range(cluster.decode_ranks)]
        self._now, self._number = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: deque[int] = deque()
        self._chunks: dict[int, list[_Chunk]] = {}
        self._rank_of: dict[int, int] = {}
        # When each request got a backend, and what is written of those that have none yet.
        self._granted: dict[int, float] = {}
        self._held_back: dict[int, list[Write]] = defaultdict(list)
        self._taken: dict[int, Blocks] = {}
        count = len(self._requests)
        self._ttft, self._per_token = [0.0] * count, [0.0] * count
        self._ranks = [0] * count

    def run(self) -> Served:
        """Runs until all is answered."""
        for number, request in enumerate(self._requests):
            self._at(request.arrival, partial(self._arrive, number))
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        scheduler, pool = self._engine.scheduler, self._decode_pool
        assert not any(map(pool.referenced, range(pool.world_size)))
        assert scheduler.waiting == scheduler.running == scheduler.held == 0
        assert not self._sender.outgoing
        for each in self._decoding:
            assert not each.receiver.incoming
            assert (each.rows, each.used, each.virtual) == (0, 0, 0)
        answered = [
            seconds
            for seconds, request in zip(self._per_token, self._requests, strict=True)
            if request.answer > 1
        ]
        return Served(self._ttft, answered, self._ranks)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, self._number, event))
        self._number += 1

    # Arrival and prefill.

    def _arrive(self, number: int) -> None:
        self._waiting.append(number)
        self._admit()
        # All that arrive at this moment are fed together.
        self._at(self._now, self._prefill)

    def _admit(self) -> None:
        """Gives the engine the requests in line for which a decode rank has blocks."""
        while self._waiting:
            number = self._waiting[0]
            request = self._requests[number]
            blocks = -(-(request.prompt + request.answer) // self._cluster.block_size)
            loads = [
                DecodeRank(self._decode_blocks, each.used, each.virtual, len(each.ending))
                for each in self._decoding
            ]
            rank = choose_decode_rank(loads, blocks)
            if rank is None:
                return
            self._waiting.popleft()
            counts = [0] * len(self._decoding)
            counts[rank] = blocks
            self._taken[number] = self._decode_pool.allocate(counts)
            self._decoding[rank].virtual += blocks
            self._rank_of[number] = rank
            self._engine.add(number, [0] * request.prompt, 0, request.arrival)
            starts = range(0, request.prompt, self._cluster.max_num_batched_tokens)
            sizes = [
                min(self._cluster.max_num_batched_tokens, request.prompt - start)
                for start in starts
            ]
            self._chunks[number] = [*map(_Chunk, sizes)]
            begin = Begin(Transfer(number), len(sizes), 1)
            self._tell_receiver(rank, begin)
            self._tell_sender(begin)
            self._decoding[rank].line.append(number)
            self._grant(rank)

    def _prefill(self) -> None:
        """Begins an iteration of the engine, unless one is under way or there is nothing to do."""
        if self._engine.busy:
            return
        begun = self._engine.begin()
        if begun is None:
            return
        for feed in begun.batch.feeds:
            ranks = len({*feed.ranks.tolist()})
            self._ranks[feed.sequence] = ranks
            for _, chunk in self._part(feed.sequence, feed.start, feed.start + feed.count):
                chunk.started, chunk.ranks = min(chunk.started, self._now), ranks
        self._at(self._now + begun.seconds, partial(self._end, begun))

    def _end(self, begun: SimulatedIteration) -> None:
        self._engine.end()
        for feed in begun.batch.feeds:
            number, end = feed.sequence, feed.start + feed.count
            request = self._requests[number]
            if end == request.prompt:
                self._ttft[number] = self._now - request.arrival
            for place, chunk in self._part(number, feed.start, end):
                if end >= min((place + 1) * self._cluster.max_num_batched_tokens, request.prompt):
                    chunk.computed = self._now
                    self._tell_sender(Computed(Transfer(number), place, 0))
        self._prefill()

    def _part(self, number: int, start: int, end: int) -> Iterator[tuple[int, _Chunk]]:
        """Yields the chunks of the hand-off that have positions of `[start, end)`."""
        size = self._cluster.max_num_batched_tokens
        for place in range(start // size, -(-end // size)):
            yield place, self._chunks[number][place]

    # Hand-off.

    def _tell_sender(self, event: SenderEvent) -> None:
        self._sender, actions = send(self._sender, event, self._now)
        for action in actions:
            self._act(action, None)

    def _tell_receiver(self, rank: int, event: ReceiverEvent) -> None:
        each = self._decoding[rank]
        each.receiver, actions = receive(each.receiver, event, self._now)
        for action in actions:
            self._act(action, rank)

    def _act(self, action: Action, rank: int | None) -> None:
        """Does what a side of the hand-off asks for: decode rank `rank`, or the prefill side."""
        match action:
            case Send(message):
                if rank is None:
                    rank = self._rank_of[message.transfer.request]
                    self._tell_receiver(rank, cast("ReceiverEvent", message))
                else:
                    self._tell_sender(cast("SenderEvent", message))
            case Write(transfer) if transfer.request in self._granted:
                self._write(action)
            case Write(transfer):
                self._held_back[transfer.request].append(action)
            case Start(transfer):
                assert rank is not None
                self._decoding[rank].joining.append(transfer.request)
                self._iterate(rank)
                self._decoding[rank].line.remove(transfer.request)
                self._grant(rank)
            case Free(transfer) if rank is None:
                self._engine.abort(transfer.request)
                # What waited for blocks may begin, once all of this moment has happened.
                self._at(self._now, self._prefill)

    def _grant(self, rank: int) -> None:
        """Gives backends of a decode rank to the first in line, and sends what is computed."""
        for number in self._decoding[rank].line[: self._cluster.backends]:
            self._granted.setdefault(number, self._now)
            for write in self._held_back.pop(number, ()):
                self._write(write)

    def _write(self, write: Write) -> None:
        """Sends a chunk: as much as could be during its computing is sent by now."""
        chunk = self._chunks[write.transfer.request][write.chunk]
        whole = self._cluster.send_seconds(chunk.tokens, chunk.ranks)
        granted = self._granted[write.transfer.request]
        overlapped = max(0.0, chunk.computed - max(granted, chunk.started))
        left = max(whole / self._cluster.layers, whole - overlapped)
        self._at(self._now + left, partial(self._land, write))

    def _land(self, write: Write) -> None:
        where = (write.transfer, write.chunk, write.layer)
        self._tell_receiver(self._rank_of[write.transfer.request], Landed(*where))
        self._tell_sender(Written(*where))

    # Decoding.

    def _iterate(self, rank: int) -> None:
        """Begins an iteration, unless one is under way or there is nothing to decode."""
        each = self._decoding[rank]
        if each.running:
            return
        joining, each.joining = each.joining, []
        for number in joining:
            request = self._requests[number]
            blocks = len(self._taken[number][rank])
            each.virtual -= blocks
            each.used += blocks
            each.rows += request.prompt
            heapq.heappush(each.ending, (each.iteration + request.answer - 1, number))
            self._tell_receiver(rank, Started(Transfer(number)))
        self._finish(rank)
        if each.ending:
            each.running = True
            each.rows += len(each.ending)
            seconds = self._cluster.decode_times.seconds(each.rows)
            self._at(self._now + seconds, partial(self._iterated, rank))

    def _iterated(self, rank: int) -> None:
        each = self._decoding[rank]
        each.running = False
        each.iteration += 1
        self._iterate(rank)

    def _finish(self, rank: int) -> None:
        """Ends the requests that have all of their tokens."""
        each = self._decoding[rank]
        freed = False
        while each.ending and each.ending[0][0] <= each.iteration:
            _, number = heapq.heappop(each.ending)
            request, blocks = self._requests[number], self._taken.pop(number)
            first = request.arrival + self._ttft[number]
            self._per_token[number] = (self._now - first) / max(1, request.answer - 1)
            each.rows -= request.prompt + request.answer - 1
            each.used -= len(blocks[rank])
            self._decode_pool.release(rank, blocks[rank])
            self._tell_receiver(rank, Finish(Transfer(number)))
            freed = True
        if freed:
            self._admit()
            self._prefill()
