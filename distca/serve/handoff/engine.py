"""The engine of a server with roles: requests from their arrival to their last token.

A request waits until a decode rank has blocks for its prompt and its whole answer, and prefill
ranks have blocks for its prompt. Then it is planned, prefilled, handed over and answered; where the
hand-off fails, it is tried again, with another epoch.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from distca.inference.messages import AddRequest, NewRequest, Output, SampledToken, decoder, encode
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.cdsp import (
    LOAD_AWARE,
    DecodeRank,
    ImprovementRates,
    Load,
    PrefillModel,
    PrefillQueue,
    Search,
    choose_decode_rank,
)
from distca.schedule.serving.cdsp import handoff as hand
from distca.schedule.serving.cdsp.handoff import Transfer
from distca.schedule.serving.cdsp.strategies import strategy_of
from distca.schedule.serving.prefix_cache import PrefixCache, digests
from distca.schedule.serving.request import FinishReason, finish_of
from distca.serve.engine.messages import (
    Abort,
    AskPlan,
    AskRates,
    Begin,
    Close,
    FromEngine,
    Loaded,
    Outputs,
    PlanIs,
    RankState,
    RatesAre,
    Refused,
    ResetCache,
    Started,
    Stats,
    ToEngine,
)
from distca.serve.engine.plan_history import PlanHistory
from distca.serve.engine.settings import ServerConfig
from distca.serve.engine.workers import WorkerError, Workers
from distca.serve.handoff import messages as said
from distca.serve.handoff.measure import measure_prefills
from distca.serve.handoff.messages import Decoded, Expect, First
from distca.serve.handoff.prefill_side import Ended, Prefilled, PrefillSide
from distca.serve.handoff.settings import sequence_of, transfer_of

TRIES = 3
"""Times that a request is handed over, before it is refused."""


@dataclass
class _Request:
    """A request from its arrival to its end.

    Attributes:
        submit: the request.
        tokens: prompt, and the answer so far.
        digests: what the full blocks of its prompt are found by.
        epoch: number of its latest try.
        decode: decode rank of that; None: it waits.
        cached: tokens of the prompt that were cached on prefill ranks.
    """

    submit: AddRequest
    tokens: list[int]
    digests: Sequence[bytes]
    epoch: int = -1
    decode: int | None = None
    cached: int = 0

    @property
    def transfer(self) -> Transfer:
        """Its latest try."""
        return Transfer(self.submit.number, self.epoch)

    @property
    def most(self) -> int:
        """Most tokens of prompt and answer."""
        return len(self.submit.tokens) + self.submit.sampling.max_tokens

    @property
    def fewest(self) -> int:
        """Fewest tokens of both that stops may end."""
        return len(self.submit.tokens) + self.submit.penalties.fewest

    def finish(self) -> FinishReason | None:
        """Why its answer ends with its last token; None: it goes on."""
        return finish_of(self.tokens, self.most, self.fewest, self.submit.sampling.stops)


@dataclass
class _Decoding:
    """A decode rank: blocks of the tries that have some there, and those that are in its batch."""

    blocks: dict[Transfer, int] = field(default_factory=dict)
    batch: set[Transfer] = field(default_factory=set)
    free: int = 0
    seconds: float = 0.0

    def load(self, blocks: int) -> DecodeRank:
        """Its load, of a pool of so many blocks."""
        used = sum(self.blocks[each] for each in self.batch)
        virtual = sum(self.blocks.values()) - used
        return DecodeRank(blocks, used, virtual, len(self.batch))


class RolesEngine:
    """Requests, prefill ranks, and what is known of decode ranks.

    Args:
        settings: settings of the engine.
        api: socket to the API process.
        workers: workers of all ranks.
    """

    def __init__(self, settings: ServerConfig, api: zmq.Socket, workers: Workers) -> None:
        assert settings.roles is not None
        self._settings, self._roles = settings, settings.roles
        self._api, self._workers = api, workers
        self._decoder = decoder(ToEngine)
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[int] = deque()
        self._decoding = [_Decoding() for _ in range(self._roles.decode)]
        self._retries = self._decoded = 0
        self._plans = PlanHistory(settings, self._roles.prefill)
        self._tick_due = 0.0

    def load(self, poller: zmq.Poller) -> None:
        """Waits for all workers, makes the blocks of their pools, and knows how long prefills take.

        Raises:
            WorkerError: a worker failed.
            ValueError: there is too little room, or a strategy is not possible.
        """
        loaded: dict[int, Loaded] = {}
        while len(loaded) < self._roles.processes:
            poller.poll(1000)
            for message in self._workers.receive():
                assert isinstance(message, Loaded)
                loaded[message.rank] = message
        prefill = min(loaded[rank].blocks for rank in range(self._roles.prefill))
        decode = min(loaded[rank].blocks for rank in range(self._roles.prefill, len(loaded)))
        self.begin(prefill, decode, loaded[0].block_bytes, poller)

    def begin(self, prefill: int, decode: int, block_bytes: int, poller: zmq.Poller) -> None:
        """Makes pools of so many blocks on each prefill and decode rank, and tells everyone.

        Raises:
            ValueError: there is too little room, or a strategy is not possible.
        """
        settings, roles = self._settings, self._roles
        self._check_room(prefill, decode, block_bytes)
        for rank in range(roles.processes):
            self._post(rank, Begin(prefill if rank < roles.prefill else decode))
        times = roles.times
        if times is None:
            times = measure_prefills(settings, roles, prefill, self._workers, poller)
        degrees = [degree for degree in times.degrees if degree <= roles.prefill]
        if not degrees:
            raise ValueError(
                f"the prefill times begin at {times.degrees[0]} ranks, and there are "
                f"{roles.prefill}: measure them for 1, 2, 4, ... ranks"
            )
        self._prefill_blocks, self._decode_blocks = prefill, decode
        for each in self._decoding:
            each.free = decode
        self._load = Load(roles.rates)
        pool = BlockPool(roles.prefill, prefill, settings.block_size)
        self._cache = PrefixCache(pool, settings.prefix_caching)
        self._queue = self._make_queue(times.only(degrees))
        self._prefill = PrefillSide(
            self._queue,
            times,
            self._cache,
            len(settings.windows),
            roles.lease,
            self._post,
            self._plans,
        )
        # What can never be planned is said before requests are taken.
        self._queue.plan(0.0, 1)
        self._send(Started(self._stats(), block_bytes))

    def _make_queue(self, times: PrefillModel) -> PrefillQueue:
        roles, settings = self._roles, self._settings
        search = Search(
            times,
            smallest_chunk=max(roles.smallest_chunk, settings.block_size),
            tokens_per_rank=self._prefill_blocks * settings.block_size,
        )
        return PrefillQueue(
            roles.prefill,
            roles.prefill,
            search,
            strategy_of(roles.strategy),
            self._load if roles.strategy in LOAD_AWARE else None,
        )

    def _check_room(self, prefill: int, decode: int, block_bytes: int) -> None:
        settings, roles = self._settings, self._roles
        needed = -(-settings.positions // settings.block_size)
        largest = 1 << (roles.prefill.bit_length() - 1)
        for blocks, least, whose in (
            (prefill, -(-needed // largest), f"each of {largest} prefill ranks"),
            (decode, needed, "a decode rank"),
        ):
            if blocks < least:
                raise ValueError(
                    f"a sequence of {settings.positions:,} tokens needs {least:,} blocks of keys "
                    f"and values on {whose}, and there are {blocks:,}: raise "
                    "--kv-cache-memory-bytes, or lower --max-model-len"
                )

    def serve(self, poller: zmq.Poller) -> None:
        """Serves until it is told to end.

        Raises:
            WorkerError: a worker failed, ended or hangs.
        """
        beat = self._roles.lease / 4
        while True:
            poller.poll(int(1000 * min(1.0, max(self._tick_due - time.monotonic(), 0.0))) + 1)
            while self._api.poll(0):
                message = self._decoder.decode(self._api.recv())
                if isinstance(message, Close):
                    return
                self.take(message)
            for heard in self._workers.receive():
                self.hear(heard)
            if time.monotonic() >= self._tick_due:
                self._tick_due = time.monotonic() + beat
                self._prefill.tick()
                self._settle()
                self._check_steps()

    def take(self, message: ToEngine) -> None:
        """Takes a message of the API process."""
        if isinstance(message, AddRequest):
            self._submit(message)
        elif isinstance(message, Abort):
            request = self._requests.pop(message.number, None)
            if request is not None and request.decode is None:
                self._waiting.remove(message.number)
            elif request is not None:
                self._end_try(request)
        elif isinstance(message, ResetCache):
            self._cache.reset()
            self._send(Outputs([], self._stats()))
        elif isinstance(message, AskRates):
            self._tell_rates(message)
        else:
            assert isinstance(message, AskPlan)
            self._send(PlanIs(message.call, self._plans.saved(message.number)))
        self._settle()

    def hear(self, message: Any) -> None:
        """Takes a message of a worker."""
        if isinstance(message, Decoded):
            self._take_decoded(message)
        else:
            self._prefill.hear(message)
        self._settle()

    def _tell_rates(self, asked: AskRates) -> None:
        load, now = self._load, time.monotonic()
        if asked.by_arrivals is not None:
            load.rates = ImprovementRates(asked.by_arrivals)
        known = dict(load.rates.by_arrivals)
        rate, most = load.growth(now)
        ranks = int(most) if most < math.inf else None
        self._send(RatesAre(asked.call, known, load.per_second(now), rate, ranks))

    # Requests.

    def _submit(self, submit: AddRequest) -> None:
        settings = self._settings
        # A retry feeds tokens of the answer, too: only those of the prompt are looked for.
        names = digests(submit.tokens, settings.block_size, settings.salt)
        request = _Request(submit, list(submit.tokens), names)
        blocks, now = self._blocks_of(request), time.monotonic()
        try:
            choose_decode_rank([DecodeRank(self._decode_blocks)], blocks)
            self._queue.plan(now, len(submit.tokens))
        except ValueError as error:
            self._send(Refused(submit.number, str(error)))
            return
        self._queue.arrived(now)
        self._requests[submit.number] = request
        self._waiting.append(submit.number)

    def _blocks_of(self, request: _Request) -> int:
        return -(-request.most // self._settings.block_size)

    def _settle(self) -> None:
        """Does what follows from what has changed."""
        outputs: list[Output] = []
        while self._prefill.said:
            told, self._prefill.said = self._prefill.said, []
            for each in told:
                request = self._current(each.transfer)
                if request is None:
                    continue
                if isinstance(each, Prefilled) and each.chosen.failed is not None:
                    self._refuse(request, each.chosen)
                elif isinstance(each, Prefilled):
                    outputs.append(self._take_first(request, each.chosen))
                elif each.reason:
                    self._try_again(request, each)
        if outputs:
            self._send(Outputs(outputs, self._stats()))
        self._admit()

    def _current(self, transfer: Transfer) -> _Request | None:
        """The request of a try, if that is its latest one."""
        request = self._requests.get(transfer.request)
        if request is None or request.decode is None or request.transfer != transfer:
            return None
        return request

    def _admit(self) -> None:
        """Begins to prefill the requests in line for which there is room."""
        while self._waiting:
            request = self._requests[self._waiting[0]]
            if len(self._requests) - len(self._waiting) >= self._settings.limits.sequences:
                return
            blocks = self._blocks_of(request)
            loads = [each.load(self._decode_blocks) for each in self._decoding]
            decode = choose_decode_rank(loads, blocks)
            if decode is None or not self._begin_try(request, decode, blocks):
                return
            self._waiting.popleft()

    def _begin_try(self, request: _Request, decode: int, blocks: int) -> bool:
        submit, leader = request.submit, self._roles.leader(decode)
        transfer = Transfer(submit.number, request.epoch + 1)
        admit = NewRequest(
            sequence_of(transfer),
            submit.choice,
            list(request.tokens),
            len(submit.tokens),
            submit.sampling,
            submit.penalties,
            submit.logprobs,
        )
        begin = self._prefill.begin(transfer, admit, request.digests, leader, decode, blocks)
        if begin is None:
            return False
        request.cached = self._prefill.cached(transfer)
        request.epoch, request.decode = transfer.epoch, decode
        self._decoding[decode].blocks[transfer] = blocks
        self._post(leader, Expect(said.tell(begin), admit, request.most, request.fewest))
        self._prefill.dispatch(transfer)
        return True

    def _take_first(self, request: _Request, chosen: SampledToken) -> Output:
        """Takes the token that a prefill gave."""
        output = self._output(request, chosen, None)
        if output.finish is None:
            assert request.decode is not None
            leader = self._roles.leader(request.decode)
            self._post(leader, First(request.transfer, chosen.token))
        else:
            # Nothing is to be decoded.
            del self._requests[request.submit.number]
            self._end_try(request)
        return output

    def _refuse(self, request: _Request, chosen: SampledToken) -> None:
        """Ends a request for which no token can be chosen."""
        number = request.submit.number
        del self._requests[number]
        self._end_try(request)
        self._send(Refused(number, str(chosen.failed), fails=True))

    def _output(
        self, request: _Request, chosen: SampledToken, finish: FinishReason | None
    ) -> Output:
        request.tokens.append(chosen.token)
        finish = finish or request.finish()
        number = request.submit.number
        return Output(number, chosen.token, finish, request.cached, chosen.logprobs)

    def _take_decoded(self, message: Decoded) -> None:
        rank = self._roles.decode_rank(message.rank)
        decoding = self._decoding[rank]
        decoding.free, decoding.seconds = message.free, message.seconds
        decoding.batch |= {*message.joined}
        outputs = []
        for chosen in message.chosen:
            request = self._current(transfer_of(chosen.number))
            if request is None:
                continue
            if chosen.failed is not None:
                self._refuse(request, chosen)
                continue
            self._decoded += 1
            finish = message.finished.get(chosen.number)
            outputs.append(self._output(request, chosen, finish))
            if finish:
                del self._requests[request.submit.number]
        for each in message.freed:
            decoding.blocks.pop(each, None)
            decoding.batch.discard(each)
        self._send(Outputs(outputs, self._stats()))

    def _end_try(self, request: _Request) -> None:
        """Ends what is under way for a request, on both sides."""
        if request.decode is not None:
            self._post(self._roles.leader(request.decode), said.tell(hand.Cancel(request.transfer)))
            self._prefill.cancel(request.transfer)

    def _try_again(self, request: _Request, ended: Ended) -> None:
        self._end_try(request)
        request.decode = None
        if request.epoch + 1 < TRIES:
            self._retries += 1
            self._waiting.appendleft(request.submit.number)
            return
        del self._requests[request.submit.number]
        why = f"the hand-off failed {TRIES} times, at last since: {ended.reason}"
        self._send(Refused(request.submit.number, why))

    # Numbers.

    def _check_steps(self) -> None:
        since = self._prefill.oldest_step
        if since is not None and time.monotonic() - since > self._settings.step_timeout:
            raise WorkerError(
                f"a chunk took longer than {self._settings.step_timeout:g} s: raise "
                "--step-timeout if it does not hang"
            )

    def _stats(self) -> Stats:
        counts, cache = self._prefill.counts, self._cache
        ranks = [
            RankState(cache.free(rank), cache.referenced(rank), cache.cached(rank))
            for rank in range(self._roles.prefill)
        ]
        for each in self._decoding:
            taken = self._decode_blocks - each.free
            ranks.append(RankState(each.free, taken, 0, seconds=each.seconds))
        return Stats(
            counts.steps,
            len(self._requests) - len(self._waiting),
            len(self._waiting),
            self._retries,
            counts.tokens + self._decoded,
            counts.sought,
            counts.found,
            counts.bytes_sent,
            counts.plan_seconds,
            0.0,
            counts.seconds,
            ranks,
        )

    def _post(self, rank: int, message: Any) -> None:
        self._workers.post(rank, encode(message))

    def _send(self, message: FromEngine) -> None:
        self._api.send(encode(message))
