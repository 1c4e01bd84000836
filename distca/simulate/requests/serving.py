"""Requests through both halves of a cluster: prefill, hand-off and decode, event by event.

Prefill ranks compute the chunks of their plans in line; a chunk begins when all of its ranks have
come to it and have blocks for it. Keys and values are handed over by the state machines of
`distca.schedule.serving.cdsp`, whose messages take no time; a chunk's layers are sent during its
computing from its grant on, and the last one after it. A decode rank runs iterations over all that
were handed over by then. A request's decode blocks are those of its prompt and its whole answer, so
that nothing is preempted; where no decode rank has them, it waits before it is planned.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from distca.schedule.serving.blocks import BlockPool, Blocks
from distca.schedule.serving.cdsp import (
    ImprovementRates,
    PrefillPlan,
    Receiver,
    Sender,
    receive,
    send,
)
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.handoff import (
    Action,
    Begin,
    Computed,
    Dispatched,
    Finish,
    Free,
    Grant,
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
from distca.simulate.requests.lines import Lines
from distca.simulate.requests.prefills import EAGER, make_queue
from distca.simulate.requests.traces import RequestTrace


@dataclass(frozen=True)
class Served:
    """What became of each request, in the trace's order.

    Attributes:
        ttft: seconds from its arrival to its first token.
        per_token: seconds of each further token, from the first one on, on average; of answers of
            one token there are none.
        planned: seconds to the first token as they were planned.
        chunks: chunks of its prefill.
    """

    ttft: list[float]
    per_token: list[float]
    planned: list[float]
    chunks: list[int]


def serve(
    trace: RequestTrace, cluster: ServingCluster, strategy: str, rates: ImprovementRates = EAGER
) -> Served:
    """Simulates a trace.

    Raises:
        ValueError: a request is too long for the prefill ranks or for a decode rank.
    """
    return _Simulation(trace, cluster, strategy, rates).run()


@dataclass(eq=False)
class _Job:
    """A chunk in line on its ranks."""

    request: int
    chunk: int
    ranks: Ranks
    tokens: int
    upto: int
    seconds: float
    started: float = 0.0
    granted: float = float("inf")
    computed: float = float("inf")


@dataclass
class _Decoding:
    """A decode rank: its batch, as the iteration after which each request ends."""

    receiver: Receiver
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
        self._queue = make_queue(cluster, strategy, rates)
        size = cluster.block_size
        self._decode_blocks = cluster.decode_tokens // size
        # One block more, since every request's last block on a rank is partly filled.
        self._prefill_pool = BlockPool(
            cluster.prefill_ranks, cluster.prefill_tokens // size + 1, size
        )
        self._decode_pool = BlockPool(cluster.decode_ranks, self._decode_blocks, size)
        # In virtual time nobody is late: leases are long.
        self._sender = Sender(float("inf"))
        self._decoding = [
            _Decoding(Receiver(self._decode_blocks, cluster.backends, float("inf")))
            for _ in range(cluster.decode_ranks)
        ]
        self._now, self._number = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._lines: Lines[_Job] = Lines(cluster.prefill_ranks)
        self._without_blocks: list[_Job] = []
        self._waiting: deque[int] = deque()
        self._jobs: dict[tuple[int, int], _Job] = {}
        self._prefill_blocks: dict[int, dict[int, tuple[int, ...]]] = {}
        self._rank_of: dict[int, int] = {}
        self._taken: dict[int, Blocks] = {}
        count = len(self._requests)
        self._ttft, self._per_token = [0.0] * count, [0.0] * count
        self._planned, self._chunks = [0.0] * count, [0] * count

    def run(self) -> Served:
        """Runs until all is answered."""
        for number, request in enumerate(self._requests):
            self._at(request.arrival, partial(self._arrive, number))
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        pools = (self._prefill_pool, self._decode_pool)
        assert not any(pool.referenced(r) for pool in pools for r in range(pool.world_size))
        assert not self._sender.outgoing
        for each in self._decoding:
            assert each.receiver.free_blocks == self._decode_blocks
            assert (each.rows, each.used, each.virtual) == (0, 0, 0)
        answered = [
            seconds
            for seconds, request in zip(self._per_token, self._requests, strict=True)
            if request.answer > 1
        ]
        return Served(self._ttft, answered, self._planned, self._chunks)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, self._number, event))
        self._number += 1

    # Arrival and prefill.

    def _arrive(self, number: int) -> None:
        self._waiting.append(number)
        self._admit()

    def _admit(self) -> None:
        """Plans the requests in line for which a decode rank has blocks."""
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
            plan = self._queue.place(self._now, request.prompt)
            self._planned[number] = self._now - request.arrival + plan.ttft
            self._chunks[number] = len(plan.chunks)
            begin = Begin(Transfer(number), len(plan.chunks), 1, blocks)
            self._tell_receiver(rank, begin)
            self._tell_sender(begin)
            self._line_up(number, plan)

    def _line_up(self, number: int, plan: PrefillPlan) -> None:
        self._prefill_blocks[number] = {}
        for place, chunk in enumerate(plan.chunks):
            upto = chunk.cached + chunk.tokens
            job = _Job(number, place, chunk.ranks, chunk.tokens, upto, chunk.seconds)
            self._jobs[number, place] = job
            self._lines.add(job)
            self._begin(job)

    def _begin(self, job: _Job) -> None:
        """Begins a chunk if all of its ranks have come to it and have blocks."""
        if not self._lines.is_next(job):
            return
        if not self._take_blocks(job):
            self._without_blocks.append(job)
            return
        job.started = self._now
        self._at(self._now + job.seconds, partial(self._end, job))
        self._tell_sender(Dispatched(Transfer(job.request), job.chunk))

    def _take_blocks(self, job: _Job) -> bool:
        """Takes blocks for even shares of all tokens so far, and gives back what moves away."""
        mine = self._prefill_blocks[job.request]
        each = -(-job.upto // (len(job.ranks) * self._cluster.block_size))
        counts = [0] * self._cluster.prefill_ranks
        for rank in job.ranks:
            counts[rank] = max(0, each - len(mine.get(rank, ())))
        if not self._prefill_pool.has(counts):
            return False
        taken = self._prefill_pool.allocate(counts)
        for rank in job.ranks:
            held = mine.get(rank, ()) + taken[rank]
            self._prefill_pool.release(rank, held[each:])
            mine[rank] = held[:each]
        return True

    def _end(self, job: _Job) -> None:
        job.computed = self._now
        following = self._lines.remove([job])
        request = self._requests[job.request]
        if job.upto == request.prompt:
            self._ttft[job.request] = self._now - request.arrival
        self._tell_sender(Computed(Transfer(job.request), job.chunk, 0))
        for each in following:
            self._begin(each)

    # Hand-off.

    def _tell_sender(self, event: SenderEvent) -> None:
        if isinstance(event, Grant):
            self._jobs[event.transfer.request, event.chunk].granted = self._now
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
            case Write():
                self._write(action)
            case Start(transfer):
                assert rank is not None
                self._decoding[rank].joining.append(transfer.request)
                self._iterate(rank)
            case Free(transfer) if rank is None:
                for each, blocks in self._prefill_blocks.pop(transfer.request).items():
                    self._prefill_pool.release(each, blocks)
                waiting, self._without_blocks = self._without_blocks, []
                for job in waiting:
                    self._begin(job)

    def _write(self, write: Write) -> None:
        """Sends a chunk: as much as could be during its computing is sent by now."""
        job = self._jobs[write.transfer.request, write.chunk]
        whole = self._cluster.send_seconds(job.tokens, len(job.ranks))
        overlapped = max(0.0, job.computed - max(job.granted, job.started))
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
