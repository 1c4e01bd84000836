"""vLLM with and without prefill ranks: the same requests on the same GPUs, iteration by iteration.

A replica is a vLLM server whose GPUs share a model by tensor parallelism. Its scheduler does what
vLLM's does by default: sequences that run get tokens first, then those that wait, in the order of
their arrival, up to a number of tokens; long prompts are computed in chunks. New requests go to the
replica of the least load, as vLLM counts it for data-parallel replicas.

Prefill ranks run the engine's own scheduler and plans, which say how long an iteration takes.
Prompts of at least `least` tokens are theirs, but for the last token. Rows of a layer leave once it
is computed. A replica writes what has come between two of its steps. Servers that only prefill may
take the place of ranks, as in vLLM's own disaggregated prefill.

Every request has room for its prompt and its whole answer before it starts, so nothing is
preempted. What hosts compute is in the costs' `overheads`; each iteration of the prefill ranks
takes `host_seconds` beside them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.plan.span import Bools, Floats
from distca.schedule.serving.batches import PrefillStrategy
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.moves import BlockTransfer
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.simulate.requests.costs import PlannedCosts
from distca.simulate.requests.engine import SimulatedEngine, SimulatedIteration
from distca.simulate.requests.traces import Request, RequestTrace
from distca.simulate.serving.costs import InferenceCosts

_WAITING = 4
"""What a request that waits counts, where one that runs counts 1: vLLM's rule."""


@dataclass(frozen=True)
class Replicas:
    """vLLM servers.

    Attributes:
        costs: costs of the model on a replica's GPUs.
        number: replicas.
        tokens: most tokens of a step.
        sequences: most sequences that run in a replica.
        graph_tokens: most tokens of a step with chunks that is launched as those that only decode
            are; vLLM captures graphs of up to 512 tokens.
    """

    costs: InferenceCosts
    number: int
    tokens: int = 8192
    sequences: int = 1024
    graph_tokens: int = 512

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.number * self.costs.tensor_parallel

    @cached_property
    def room(self) -> int:
        """Tokens whose keys and values a replica holds.

        Raises:
            ValueError: the weights leave no room.
        """
        return room_of(self.costs)

    @cached_property
    def _kinds(self) -> tuple[tuple[InferenceCosts, CostModel, dict[int, float]], ...]:
        """Costs of steps whose kernels are launched one by one, and of those that graphs launch;
        seconds of their layers' linear parts by tokens, as they become known."""
        both = self.costs, self.costs.of_decode()
        return tuple((costs, costs.attention_cost(), {}) for costs in both)

    def seconds(self, chunks: Sequence[tuple[int, int]], rows: Sequence[int]) -> float:
        """Returns the seconds of a step.

        Args:
            chunks: of each chunk of a prompt the tokens before it, and its own.
            rows: of each sequence that decodes the tokens that it sees.
        """
        tokens = sum(count for _, count in chunks) + len(rows)
        costs, model, linear = self._kinds[not chunks or tokens <= self.graph_tokens]
        layers = costs.model.layers
        if tokens not in linear:
            of_all = np.array([tokens], dtype=np.int64)
            linear[tokens] = float((costs.pre_seconds(of_all) + costs.post_seconds(of_all))[0])
        before, new = np.array([*chunks, *((each - 1, 1) for each in rows)], dtype=np.int64).T
        pairs = before * new + new * (new + 1) // 2
        attention = float(model.seconds(new, before + new, pairs).sum())
        sampled = np.array([len(chunks) + len(rows)], dtype=np.int64)
        a_layer = linear[tokens] + attention + costs.cluster.launch_seconds
        once = costs.overheads.iteration_seconds + float(costs.head_seconds(sampled)[0])
        return layers * max(a_layer, costs.launch_seconds()) + once


@dataclass(frozen=True)
class PrefillRanks:
    """Ranks that prefill for vLLM.

    Attributes:
        costs: costs of the model on a rank's GPUs.
        number: ranks that share prompts.
        least: fewest tokens of a prompt that they are asked for.
        bytes_per_second: speed of a GPU's way to vLLM.
        strategy: what travels between the ranks, or who chooses it.
        tokens: most tokens of an iteration.
        sequences: most prompts that run.
        block_size: tokens of a block.
        host_seconds: seconds of an iteration's scheduling and planning, in which no GPU computes.
    """

    costs: InferenceCosts
    number: int
    least: int
    bytes_per_second: float
    strategy: PrefillStrategy = "pass-kv"
    tokens: int = 8192
    sequences: int = 64
    block_size: int = 128
    host_seconds: float = 0.0

    @property
    def gpus(self) -> int:
        """GPUs of all ranks."""
        return self.number * self.costs.tensor_parallel

    def engine(self) -> SimulatedEngine:
        """Makes the ranks' engine."""
        size, number = self.block_size, self.number
        limits = SchedulerConfig(self.sequences, self.tokens, size, 0, prefix_caching=False)
        costs = PlannedCosts(self.costs, number, size, self.strategy)
        return SimulatedEngine(limits, costs, number, room_of(self.costs) // size, size)

    def engines(self) -> list[SimulatedEngine]:
        """Makes the only engine."""
        return [self.engine()]


@dataclass(frozen=True)
class PrefillServers:
    """vLLM's disaggregated prefill: servers that only prefill, each prompt on one of them.

    Attributes:
        vllm: the servers. A prompt goes to the one with the fewest tokens to compute.
        least: fewest tokens of a prompt that they are asked for.
        bytes_per_second: speed of a GPU's way to the servers that decode.
        block_size: tokens of a block.
    """

    vllm: Replicas
    least: int
    bytes_per_second: float
    block_size: int = 128

    number, host_seconds = 1, 0.0

    @property
    def costs(self) -> InferenceCosts:
        """Costs of the model on a server's GPUs."""
        return self.vllm.costs

    @property
    def gpus(self) -> int:
        """GPUs of all servers."""
        return self.vllm.gpus

    def engines(self) -> list[SimulatedEngine]:
        """Makes the servers' engines."""
        size, of = self.block_size, self.vllm
        limits = SchedulerConfig(of.sequences, of.tokens, size, 0, prefix_caching=False)
        costs = _ServerCosts(of)
        return [SimulatedEngine(limits, costs, 1, of.room // size, size) for _ in range(of.number)]


@dataclass(frozen=True)
class _ServerCosts:
    """`IterationCosts` of a server that only prefills."""

    vllm: Replicas

    def seconds(self, feeds: Sequence[ScheduledTokens], moves: Sequence[BlockTransfer]) -> float:
        """See `IterationCosts.seconds`."""
        assert not moves, "a server is one rank"
        return self.vllm.seconds([(each.start, each.count) for each in feeds], [])


Prefilling = PrefillRanks | PrefillServers
"""What prefills for the servers that decode."""


@dataclass(frozen=True)
class Answered:
    """What became of each request, in the trace's order.

    Attributes:
        ttft: seconds from its arrival to its first token.
        per_token: seconds of each further token on average; NaN of answers of one token.
        asked: whether prefill ranks computed it.
        seconds: when the last answer ended.
    """

    ttft: Floats
    per_token: Floats
    asked: Bools
    seconds: float


def room_of(costs: InferenceCosts) -> int:
    """Returns the tokens whose keys and values fit beside the weights.

    Raises:
        ValueError: none do.
    """
    row = costs.shape.kv_row_bytes * costs.model.layers
    room = int((costs.cluster.usable_bytes - costs.state_bytes()) // row)
    if room < 1:
        raise ValueError(
            f"{costs.state_bytes() / 1e9:.0f} GB of weights leave no room for keys and values on a "
            f"GPU of {costs.cluster.name}: give more tensor parallelism"
        )
    return room


def answer(trace: RequestTrace, vllm: Replicas, ranks: Prefilling | None = None) -> Answered:
    """Simulates a trace.

    Args:
        trace: requests.
        vllm: servers that answer.
        ranks: what prefills long prompts; None: the servers do.

    Raises:
        ValueError: a request is longer than a replica or the ranks have room for.
    """
    return _Run(trace, vllm, ranks).run()


@dataclass
class _Sequence:
    """A request, and how many of its tokens have keys and values."""

    number: int
    request: Request
    asked: bool = False
    computed: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def end(self) -> int:
        """Tokens that are computed when the last one of the answer is chosen."""
        return self.request.prompt + self.request.answer - 1

    @property
    def whole(self) -> int:
        """Tokens for which it has room."""
        return self.request.prompt + self.request.answer


@dataclass
class _Replica:
    """A server: its sequences, the step under way, and what it has received."""

    room: int
    waiting: deque[_Sequence] = field(default_factory=deque)
    loaded: deque[_Sequence] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)
    loading: int = 0
    held: int = 0
    busy: bool = False
    link_free: float = 0.0
    received: float = 0.0

    @property
    def load(self) -> int:
        """The load by which new requests are routed."""
        return _WAITING * (len(self.waiting) + len(self.loaded) + self.loading) + len(self.running)


@dataclass
class _Instance:
    """An engine of prefill ranks, and tokens of its prompts that are not computed."""

    engine: SimulatedEngine
    left: int = 0


class _Run:
    def __init__(self, trace: RequestTrace, vllm: Replicas, ranks: Prefilling | None) -> None:
        self._vllm, self._ranks = vllm, ranks
        self._instances = [_Instance(each) for each in ([] if ranks is None else ranks.engines())]
        self._prefilled_by: dict[int, _Instance] = {}
        self._sequences = [_Sequence(n, each) for n, each in enumerate(trace.requests)]
        longest = max(each.whole for each in self._sequences)
        if longest > vllm.room:
            raise ValueError(
                f"a request of {longest:,} tokens is more than a replica's {vllm.room:,}: give it "
                "more tensor parallelism"
            )
        self._replicas = [_Replica(vllm.room) for _ in range(vllm.number)]
        self._of: dict[int, _Replica] = {}
        self._now, self._count = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> Answered:
        for each in self._sequences:
            self._at(each.request.arrival, partial(self._arrive, each))
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        for replica in self._replicas:
            assert (replica.held, replica.loading, len(replica.running)) == (0, 0, 0)
        per_token = [
            (each.last - each.first) / (n - 1) if (n := each.request.answer) > 1 else float("nan")
            for each in self._sequences
        ]
        return Answered(
            np.array([each.first - each.request.arrival for each in self._sequences]),
            np.array(per_token),
            np.array([each.asked for each in self._sequences]),
            max(each.last for each in self._sequences),
        )

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, self._count, event))
        self._count += 1

    # vLLM.

    def _arrive(self, sequence: _Sequence) -> None:
        replica = min(self._replicas, key=lambda each: each.load)
        self._of[sequence.number] = replica
        replica.waiting.append(sequence)
        self._step(replica)

    def _step(self, replica: _Replica) -> None:
        """Begins a replica's step, unless one is under way or there is nothing to compute."""
        if replica.busy:
            return
        left, fed = self._vllm.tokens, list[tuple[_Sequence, int]]()
        for each in replica.running:
            left -= self._feed(each, left, fed)
        while left and len(replica.running) < self._vllm.sequences:
            following = self._next(replica)
            if following is None:
                break
            replica.running.append(following)
            left -= self._feed(following, left, fed)
        if not fed:
            return
        replica.busy = True
        prompts = [
            (each.computed, count) for each, count in fed if each.computed < each.request.prompt
        ]
        rows = [each.computed + 1 for each, _ in fed if each.computed >= each.request.prompt]
        seconds = self._vllm.seconds(prompts, rows)
        # Rows that have come are read and written once more.
        costs, received = self._vllm.costs, replica.received
        replica.received = 0.0
        seconds += 2 * received / (costs.cluster.copied_bytes_per_second * costs.tensor_parallel)
        self._at(self._now + seconds, partial(self._stepped, replica, fed))

    def _feed(self, each: _Sequence, left: int, fed: list[tuple[_Sequence, int]]) -> int:
        """Feeds a sequence what it can be fed next; returns how many tokens."""
        count = min(max(each.request.prompt - each.computed, 1), left)
        if count:
            fed.append((each, count))
        return count

    def _next(self, replica: _Replica) -> _Sequence | None:
        """The next sequence to run; asks prefill ranks for those before it that are theirs."""
        if replica.loaded:
            return replica.loaded.popleft()
        while replica.waiting and replica.held + replica.waiting[0].whole <= replica.room:
            each = replica.waiting.popleft()
            replica.held += each.whole
            if self._ranks is None or each.request.prompt < max(self._ranks.least, 2):
                return each
            self._ask(each, replica)
        return None

    def _stepped(self, replica: _Replica, fed: Sequence[tuple[_Sequence, int]]) -> None:
        replica.busy = False
        for each, count in fed:
            each.computed += count
            if each.computed == each.request.prompt:
                each.first = self._now
            if each.computed == each.end:
                each.last = self._now
                replica.running.remove(each)
                replica.held -= each.whole
        self._step(replica)

    # Prefill ranks.

    def _ask(self, each: _Sequence, replica: _Replica) -> None:
        each.asked = True
        replica.loading += 1
        tokens = each.request.prompt - 1
        instance = min(self._instances, key=lambda each: each.left)
        self._prefilled_by[each.number] = instance
        instance.left += tokens
        instance.engine.add(each.number, [0] * tokens, 0, self._now)
        self._at(self._now, partial(self._iterate, instance))

    def _iterate(self, instance: _Instance) -> None:
        """Begins an iteration of the ranks, unless one is under way or there is nothing to do."""
        assert self._ranks is not None
        if instance.engine.busy:
            return
        begun = instance.engine.begin()
        if begun is not None:
            end = self._now + self._ranks.host_seconds + begun.seconds
            self._at(end, partial(self._iterated, instance, begun, self._now))

    def _iterated(self, instance: _Instance, begun: SimulatedIteration, start: float) -> None:
        instance.engine.end()
        for entry in begun.batch.feeds:
            each = self._sequences[entry.sequence]
            instance.left -= entry.count
            landed = self._send(each, entry.count, start)
            if entry.start + entry.count == each.request.prompt - 1:
                self._at(landed, partial(self._load, each))
        self._iterate(instance)

    def _send(self, each: _Sequence, tokens: int, start: float) -> float:
        """Sends rows of an iteration that began at `start` and ends now; returns when they are
        there."""
        assert self._ranks is not None
        ranks, replica, costs = self._ranks, self._of[each.number], self._vllm.costs
        layers, of_rank = costs.model.layers, ranks.costs.tensor_parallel
        nbytes = tokens * ranks.costs.shape.kv_row_bytes * layers * of_rank
        links = min(ranks.number * of_rank, costs.tensor_parallel)
        seconds = nbytes / (ranks.bytes_per_second * links)
        first = start + (self._now - start) / layers
        landed = max(max(replica.link_free, first) + seconds, self._now + seconds / layers)
        replica.link_free = landed
        self._at(landed, partial(self._receive, replica, nbytes))
        return landed

    def _receive(self, replica: _Replica, nbytes: float) -> None:
        replica.received += nbytes

    def _load(self, each: _Sequence) -> None:
        """Lets a request run whose rows are all there."""
        instance = self._prefilled_by[each.number]
        instance.engine.abort(each.number)
        replica = self._of[each.number]
        replica.loading -= 1
        each.computed = each.request.prompt - 1
        replica.loaded.append(each)
        self._step(replica)
        self._at(self._now, partial(self._iterate, instance))
