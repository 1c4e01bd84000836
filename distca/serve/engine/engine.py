"""The engine's process: it takes requests of the API process, and tells workers what to run."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Collection
from pathlib import Path

import zmq

from distca.inference.engine import Engine
from distca.inference.messages import AddRequest, ModelOutput, decoder, encode
from distca.lifetime import end_with_parent
from distca.serve.engine.messages import (
    Abort,
    AskPlan,
    Begin,
    Close,
    Dead,
    FromEngine,
    Loaded,
    Outputs,
    PlanIs,
    RankState,
    Refused,
    ResetCache,
    Started,
    Stats,
    ToEngine,
)
from distca.serve.engine.plan_history import PlanHistory
from distca.serve.engine.settings import ServerConfig
from distca.serve.engine.workers import WorkerError, Workers
from distca.serve.handoff.engine import RolesEngine


class EngineProcess:
    """An engine between the API process and the workers.

    Args:
        settings: settings of the server.
        api: socket to the API process.
        workers: workers of all ranks.
    """

    def __init__(self, settings: ServerConfig, api: zmq.Socket, workers: Workers) -> None:
        self._settings, self._api, self._workers = settings, api, workers
        self._decoder = decoder(ToEngine)
        self._members: Collection[int] = ()
        self._plans = PlanHistory(settings, settings.world_size)
        self._done: dict[int, ModelOutput] = {}
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
        self._engine = Engine(self._settings, blocks)
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
            try:
                self._engine.add(message)
            except ValueError as error:
                self._send(Refused(message.number, str(error)))
        elif isinstance(message, Abort):
            self._engine.abort(message.number)
        elif isinstance(message, ResetCache):
            self._engine.cache.reset()
            self._send(Outputs([], self._stats()))
        else:
            assert isinstance(message, AskPlan), "only engines with roles are asked for rates"
            self._send(PlanIs(message.call, self._plans.saved(message.number)))

    def start_iteration(self) -> bool:
        """Begins the next iteration; returns whether there is one under way."""
        if self._engine.busy:
            return True
        begun = self._engine.schedule()
        if begun is None:
            return False
        self._plans.keep(begun.chunks, begun.entries)
        self._members = begun.members
        self._workers.start(begun.batch, begun.members)
        self._workers.begin_step()
        return True

    def take_done(self, done: ModelOutput) -> None:
        """Takes what a worker has run; the iteration ends with the last of those with a part."""
        self._done[done.rank] = done
        if len(self._done) == len(self._members):
            outputs, failed = self._engine.finish(self._done)
            for each in failed:
                self._send(Refused(each.number, str(each.failed), fails=True))
            self._workers.end_step()
            self._send(Outputs(outputs, self._stats()))
            self._done = {}

    def _stats(self) -> Stats:
        scheduler, cache, counts = self._engine.scheduler, self._engine.cache, self._engine.counts
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
            counts.iterations,
            scheduler.running,
            scheduler.waiting,
            scheduler.preemptions,
            counts.computed,
            scheduler.looked_up,
            scheduler.found,
            counts.bytes_moved,
            counts.plan_seconds,
            counts.schedule_seconds,
            counts.step_seconds,
            ranks,
        )

    def _send(self, message: FromEngine) -> None:
        self._api.send(encode(message))


def run_engine(settings: ServerConfig, folder: str, parent: int) -> None:
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
        kind = EngineProcess if settings.roles is None else RolesEngine
        engine: EngineProcess | RolesEngine = kind(settings, api, workers)
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
