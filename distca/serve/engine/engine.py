"""The engine: the process that decides what each iteration feeds, and tells all workers."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import zmq

from distca.inference.sampling import TokenLogprobs
from distca.lifetime import end_with_parent
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.iteration import BatchEntry
from distca.schedule.serving.prefix_cache import PrefixCache
from distca.schedule.serving.scheduler import ScheduledTokens, Scheduler, SchedulerOutput, is_long
from distca.serve.engine.messages import (
    Abort,
    AddRequest,
    AskPlan,
    Begin,
    Close,
    Dead,
    ExecuteBatch,
    FromEngine,
    Loaded,
    ModelOutput,
    Moved,
    NewRequest,
    Output,
    Outputs,
    PlanIs,
    RankState,
    Refused,
    ResetCache,
    SampledToken,
    ScheduledRequest,
    Started,
    Stats,
    ToEngine,
    decoder,
    encode,
)
from distca.serve.engine.plan_history import PlanHistory
from distca.serve.engine.settings import EngineConfig
from distca.serve.engine.workers import WorkerError, Workers
from distca.serve.handoff.engine import RolesEngine


class Engine:
    """Sequences, the scheduler, and the iteration under way.

    Args:
        settings: settings of the engine.
        api: socket to the API process.
        workers: workers of all ranks.
    """

    def __init__(self, settings: EngineConfig, api: zmq.Socket, workers: Workers) -> None:
        self._settings, self._api, self._workers = settings, api, workers
        self._decoder = decoder(ToEngine)
        self._submitted: dict[int, AddRequest] = {}
        self._tokens: dict[int, list[int]] = {}
        self._found: dict[int, int] = {}
        self._scores: dict[int, dict[int, TokenLogprobs]] = {}
        self._drop: list[int] = []
        self._last: dict[int, int] = {}
        self._ranks: dict[int, list[int]] = {}
        # Ranks that hold blocks of each sequence; workers that have a part in the iteration.
        self._holders: dict[int, set[int]] = {}
        self._members: Collection[int] = ()
        self._plans = PlanHistory(settings, settings.world_size)
        self._batch: SchedulerOutput | None = None
        self._done: dict[int, ModelOutput] = {}
        self._counts = dict.fromkeys(("iterations", "computed", "bytes"), 0)
        self._seconds = dict.fromkeys(("plan", "schedule", "step"), 0.0)
        self._begin = 0.0
        self._weights = dict.fromkeys(range(settings.processes), 0)

    def load(self, poller: zmq.Poller) -> None:
        """Waits for all workers, and makes the blocks of their pools.

        Raises:
            WorkerError: a worker failed.
            ValueError: there is too little room.
        """
        settings = self._settings
        loaded: dict[int, Loaded] = {}
        while len(loaded) < settings.processes:
            poller.poll(1000)
            for message in self._workers.receive():
                assert isinstance(message, Loaded)
                loaded[message.rank] = message
        self._weights = {rank: each.weight_bytes for rank, each in loaded.items()}
        blocks = min(each.blocks for each in loaded.values())
        block_bytes = loaded[0].block_bytes
        settings.check_pools(blocks, block_bytes)
        self.begin(blocks, block_bytes)

    def begin(self, blocks: int, block_bytes: int) -> None:
        """Makes pools of so many blocks, and tells everyone."""
        settings = self._settings
        pool = BlockPool(settings.world_size, blocks, settings.block_size)
        self._cache = PrefixCache(pool, settings.prefix_caching)
        self._scheduler = Scheduler(
            self._cache, settings.limits, settings.salt, settings.sparse_salt
        )
        self._workers.send(Begin(blocks))
        self._send(Started(self._stats(), block_bytes))

    def serve(self, poller: zmq.Poller) -> None:
        """Serves until it is told to end.

        Raises:
            WorkerError: a worker failed, ended or hangs.
        """
        while True:
            self.start_iteration()
            poller.poll(1000)
            while self._api.poll(0):
                message = self._decoder.decode(self._api.recv())
                if isinstance(message, Close):
                    return
                self.take(message)
            for done in self._workers.receive():
                assert isinstance(done, ModelOutput)
                self.take_done(done)

    def take(self, message: ToEngine) -> None:
        """Takes a message of the API process."""
        if isinstance(message, AddRequest):
            sampling, stops = message.sampling, message.sampling.stops
            try:
                self._scheduler.add(
                    message.number,
                    message.tokens,
                    sampling.max_tokens,
                    stops,
                    message.penalties.fewest,
                    message.leader,
                    message.scored,
                )
            except ValueError as error:
                self._send(Refused(message.number, str(error)))
                return
            self._submitted[message.number] = message
            self._tokens[message.number] = list(message.tokens)
        elif isinstance(message, Abort):
            if self._scheduler.abort(message.number):
                self._forget(message.number)
        elif isinstance(message, ResetCache):
            self._cache.reset()
            self._send(Outputs([], self._stats()))
        else:
            assert isinstance(message, AskPlan), "only engines with roles are asked for rates"
            self._send(PlanIs(message.call, self._plans.saved(message.number)))

    def start_iteration(self) -> bool:
        """Begins the next iteration; returns whether there is one under way."""
        if self._batch is not None:
            return True
        begin = time.perf_counter()
        batch = self._scheduler.schedule()
        self._seconds["schedule"] += time.perf_counter() - begin
        if batch is None:
            return False
        self._batch, self._begin = batch, begin
        for number in batch.preempted:
            self._drop.append(number)
            del self._ranks[number], self._holders[number]
        admits, feeds = [], []
        for feed in batch.feeds:
            if feed.admitted:
                admits.append(self._admit(feed))
            ranks = [block.rank for block in feed.new_blocks]
            self._ranks[feed.sequence] += ranks
            self._holders[feed.sequence].update(ranks)
            feeds.append(
                ScheduledRequest(
                    feed.sequence,
                    feed.start,
                    feed.count,
                    feed.samples,
                    ranks,
                    [block.number for block in feed.new_blocks],
                    None if feed.admitted else self._last.pop(feed.sequence, None),
                )
            )
        # Sequences that gave up their blocks meanwhile have none that could move.
        for move in batch.moves:
            if move.sequence in self._ranks:
                self._ranks[move.sequence][move.index] = move.to.rank
        for sequence in {move.sequence for move in batch.moves} & self._ranks.keys():
            self._holders[sequence] = set(self._ranks[sequence])
        self._keep_parts(batch)
        drop, self._drop = self._drop, []
        moves = [Moved(each.sequence, each.index, *each.source, *each.to) for each in batch.moves]
        self._members = self._with_a_part(batch)
        iteration = ExecuteBatch(self._counts["iterations"], drop, admits, feeds, moves)
        self._workers.start(iteration, self._members)
        self._workers.begin_step()
        self._counts["iterations"] += 1
        self._counts["computed"] += sum(feed.count for feed in batch.feeds)
        return True

    def _with_a_part(self, batch: SchedulerOutput) -> Collection[int]:
        """Workers that have a part in an iteration: those that hold keys of what is fed."""
        settings = self._settings
        if batch.moves or not settings.members_only:
            return range(settings.processes)
        ranks = set[int]().union(*(self._holders[feed.sequence] for feed in batch.feeds))
        size = settings.tensor_parallel_size
        return {rank * size + number for rank in ranks for number in range(size)}

    def _admit(self, feed: ScheduledTokens) -> NewRequest:
        submit = self._submitted[feed.sequence]
        self._ranks[feed.sequence], self._holders[feed.sequence] = [], set()
        self._found.setdefault(feed.sequence, feed.start)
        self._last.pop(feed.sequence, None)
        return NewRequest(
            feed.sequence,
            submit.choice,
            # A copy: workers without a part in the iteration are told of it later.
            list(self._tokens[feed.sequence]),
            len(submit.tokens),
            submit.sampling,
            submit.penalties,
            submit.logprobs,
            submit.scored and len(self._tokens[feed.sequence]) == len(submit.tokens),
        )

    def _keep_parts(self, batch: SchedulerOutput) -> None:
        """Keeps what the plan of chunks is made of."""
        chunked = [feed.sequence for feed in batch.feeds if feed.count > 1]
        parts = tuple(self._part(feed) for feed in batch.feeds) if chunked else ()
        self._plans.keep(chunked, parts)

    def _part(self, feed: ScheduledTokens) -> BatchEntry:
        ranks = np.array(self._ranks[feed.sequence], dtype=np.int64)
        dense = not is_long(len(self._submitted[feed.sequence].tokens), self._settings.limits)
        return BatchEntry(feed.sequence, feed.start, feed.count, ranks, dense)

    def take_done(self, done: ModelOutput) -> None:
        """Takes what a worker has run; the iteration ends with the last of those with a part."""
        self._done[done.rank] = done
        if len(self._done) == len(self._members):
            self._end_iteration()

    def _end_iteration(self) -> None:
        batch, done = self._batch, self._done
        assert batch is not None, "no iteration is under way"
        said = [each for worker in done.values() for each in worker.chosen]
        self._refuse([each for each in said if each.failed is not None])
        chosen: dict[int, SampledToken] = {each.number: each for each in said}
        tokens = {number: each.token for number, each in chosen.items()}
        for each in (scores for d in done.values() for scores in d.scores):
            if each.number not in self._submitted:
                # It was aborted meanwhile, and is forgotten.
                continue
            self._scores.setdefault(each.number, {}).update(each.tokens)
        outputs = []
        for advance in self._scheduler.advance(batch, tokens):
            number = advance.sequence
            self._tokens[number].append(advance.token)
            self._last[number] = advance.token
            outputs.append(
                Output(
                    number,
                    advance.token,
                    advance.finish,
                    self._found[number],
                    chosen[number].logprobs,
                    [each for _, each in sorted(self._scores.pop(number, {}).items())],
                )
            )
            if advance.finish:
                self._forget(number)
        self._counts["bytes"] += sum(each.bytes_sent for each in done.values())
        self._seconds["plan"] += max(each.plan_seconds for each in done.values())
        self._seconds["step"] += time.perf_counter() - self._begin
        self._workers.end_step()
        self._batch = None
        self._send(Outputs(outputs, self._stats()))
        self._done = {}

    def _refuse(self, failed: Sequence[SampledToken]) -> None:
        """Ends sequences of the iteration for which no token can be chosen."""
        for each in failed:
            # The scheduler gives the blocks back, and keeps none of them for others.
            if self._scheduler.abort(each.number):
                self._forget(each.number)
                self._send(Refused(each.number, str(each.failed), fails=True))

    def _forget(self, number: int) -> None:
        """Forgets a sequence that has ended; workers do with the next iteration."""
        for known in (self._submitted, self._tokens, self._found, self._last, self._scores):
            known.pop(number, None)  # type: ignore[attr-defined]
        self._holders.pop(number, None)
        if self._ranks.pop(number, None) is not None:
            self._drop.append(number)

    def _stats(self) -> Stats:
        scheduler, cache = self._scheduler, self._cache
        ranks = []
        for rank in range(self._settings.world_size):
            blocks = cache.free(rank), cache.referenced(rank), cache.cached(rank)
            size = self._settings.tensor_parallel_size
            last = [each for process, each in self._done.items() if process // size == rank]
            ranks.append(
                RankState(
                    *blocks,
                    max((each.tokens for each in last), default=0),
                    sum(each.bytes_sent for each in last),
                    max((each.seconds for each in last), default=0.0),
                    sum(self._weights[rank * size + number] for number in range(size)),
                )
            )
        return Stats(
            self._counts["iterations"],
            scheduler.running,
            scheduler.waiting,
            scheduler.preemptions,
            self._counts["computed"],
            scheduler.looked_up,
            scheduler.found,
            self._counts["bytes"],
            self._seconds["plan"],
            self._seconds["schedule"],
            self._seconds["step"],
            ranks,
        )

    def _send(self, message: FromEngine) -> None:
        self._api.send(encode(message))


def run_engine(settings: EngineConfig, folder: str, parent: int) -> None:
    """Runs an engine: the main function of its process, which another ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != parent:
        return
    api: zmq.Socket = zmq.Context.instance().socket(zmq.PAIR)
    api.connect(f"ipc://{folder}/engine")
    poller = zmq.Poller()
    poller.register(api, zmq.POLLIN)
    workers: Workers | None = None
    why: str | None = None
    try:
        workers = Workers(settings, Path(folder), poller)
        kind = Engine if settings.roles is None else RolesEngine
        engine: Engine | RolesEngine = kind(settings, api, workers)
        engine.load(poller)
        engine.serve(poller)
    except (WorkerError, ValueError) as error:
        why = str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        why = f"the engine failed: {type(error).__name__}: {error} ({at})"
    finally:
        if why is not None:
            api.send(encode(Dead(why)))
        if workers is not None:
            workers.close(why)
        zmq.Context.instance().destroy(linger=1000)
