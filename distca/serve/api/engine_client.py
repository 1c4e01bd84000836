"""The API process's side of its engine: sequences out, tokens in."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from distca.inference.messages import AddRequest, Output, decoder, encode
from distca.lifetime import signals_held
from distca.schedule.serving.cdsp.load import Growth
from distca.serve.engine.messages import (
    Abort,
    AskPlan,
    AskRates,
    Close,
    Dead,
    FromEngine,
    Outputs,
    PlanIs,
    RatesAre,
    Refused,
    ResetCache,
    Started,
    Stats,
    ToEngine,
)
from distca.serve.engine.settings import ServerConfig

_SECONDS_TO_SAY_WHY = 2.0
_SECONDS_TO_END = 5.0
_SECONDS_TO_END_DEAD = 1.0


class EngineError(RuntimeError):
    """Raised if the engine has ended; the message says why."""


class AnswerError(RuntimeError):
    """Raised if the model cannot answer a sequence; the message says why."""


class RefusedError(ValueError):
    """Raised if a sequence can never be answered; the message says why."""


@dataclass
class _Sequence:
    """A sequence that is being answered: where its tokens go."""

    index: int
    queue: asyncio.Queue[tuple[int, Output | Exception]]


class EngineClient:
    """An engine's process, and the sequences that it answers.

    Args:
        settings: settings of the engine.
        on_dead: function that is told why, if the engine ends by itself.
        on_stats: function that is given the numbers of each iteration.
    """

    def __init__(
        self,
        settings: ServerConfig,
        on_dead: Callable[[str], None] = lambda why: None,
        on_stats: Callable[[Stats], None] = lambda stats: None,
    ) -> None:
        self.settings = settings
        self.on_dead, self._on_stats = on_dead, on_stats
        self._numbers = itertools.count()
        self._sequences: dict[int, _Sequence] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.dead: str | None = None
        self.stats: Stats | None = None
        self.block_bytes = 0

    async def start(self) -> None:
        """Starts the engine, and waits until it has loaded the model.

        Raises:
            EngineError: it cannot start.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="distca-serve-")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.bind(f"ipc://{self._folder.name}/engine")
        self._decoder = decoder(FromEngine)
        context = multiprocessing.get_context("spawn")
        arguments = (self.settings, self._folder.name, os.getpid())
        self._process: Any = context.Process(target=_start_engine, args=arguments)
        resource_tracker.ensure_running()
        with signals_held():
            self._process.start()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(started))
        self._watcher = asyncio.create_task(self._watch())
        await started

    @property
    def outstanding(self) -> int:
        """Sequences that are being answered, or wait."""
        return len(self._sequences)

    async def answer(
        self, submits: Sequence[AddRequest], numbered: Callable[[Sequence[int]], None]
    ) -> AsyncIterator[tuple[int, Output]]:
        """Has sequences answered, and yields their tokens with the place of each in `submits`.

        Sequences that have not ended when the caller leaves are aborted.

        Args:
            submits: the sequences, all answers to the first prompt first; their numbers are given
                here.
            numbered: function that is told the numbers.

        Raises:
            EngineError: the engine has ended.
            RefusedError: a sequence can never be answered.
            AnswerError: the model cannot answer a sequence.
        """
        if self.dead is not None:
            raise EngineError(self.dead)
        queue: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()
        left: set[int] = set()
        try:
            numbers = [next(self._numbers) for _ in submits]
            left.update(numbers)
            for index, number in enumerate(numbers):
                self._sequences[number] = _Sequence(index, queue)
            leads = [number - each.choice for number, each in zip(numbers, submits, strict=True)]
            # The one that computes a prompt for its other answers, too, comes after them.
            for index in sorted(
                range(len(numbers)), key=lambda n: (leads[n], numbers[n] == leads[n])
            ):
                number, leader = numbers[index], leads[index]
                each = msgspec.structs.replace(
                    submits[index], number=number, leader=None if leader == number else leader
                )
                await self._send(each)
            numbered(numbers)
            while left:
                index, said = await queue.get()
                if isinstance(said, Exception):
                    raise said
                if said.number not in left:
                    continue
                if said.finish:
                    left.discard(said.number)
                    self._sequences.pop(said.number, None)
                yield index, said
        finally:
            for number in left:
                # A sequence that was aborted by its number is no longer there.
                if self._sequences.pop(number, None) is not None and self.dead is None:
                    self._send_now(Abort(number))

    def abort(self, number: int) -> None:
        """Ends a sequence whose answer has all that it needs."""
        if self._sequences.pop(number, None) is not None and self.dead is None:
            self._send_now(Abort(number))

    async def reset_cache(self) -> None:
        """Forgets all full blocks of ended sequences."""
        await self._send(ResetCache())

    async def plan_of(self, number: int) -> str | None:
        """Returns the plan of a sequence's last chunk, as it is saved; None: it is not known."""
        call, answer = self._call()
        await self._send(AskPlan(call, number))
        return await answer  # type: ignore[no-any-return]

    async def rates(self, by_arrivals: dict[float, Growth] | None) -> RatesAre:
        """Returns the improvement rates of prefills, after others are set if some are given."""
        call, answer = self._call()
        await self._send(AskRates(call, by_arrivals))
        return await answer  # type: ignore[no-any-return]

    def _call(self) -> tuple[int, asyncio.Future[Any]]:
        call = next(self._numbers)
        self._calls[call] = asyncio.get_running_loop().create_future()
        return call, self._calls[call]

    async def close(self) -> None:
        """Ends the engine and its workers."""
        self._watcher.cancel()
        self._reader.cancel()
        if self.dead is None:
            await self._send(Close())
        # An engine that has failed has said why, and its workers end with it.
        seconds = _SECONDS_TO_END if self.dead is None else _SECONDS_TO_END_DEAD
        await asyncio.to_thread(self._process.join, seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    async def _send(self, message: ToEngine) -> None:
        if self.dead is not None:
            raise EngineError(self.dead)
        await self._socket.send(encode(message))

    def _send_now(self, message: ToEngine) -> None:
        """Sends a message from where nothing can be waited for."""
        asyncio.ensure_future(self._send(message)).add_done_callback(lambda done: done.exception())

    async def _read(self, started: asyncio.Future[None]) -> None:
        while True:
            message = self._decoder.decode(await self._socket.recv())
            if isinstance(message, Outputs):
                self._take_stats(message.stats)
                for output in message.outputs:
                    self._hand_on(output.number, output)
            elif isinstance(message, Started):
                self.block_bytes = message.block_bytes
                self._take_stats(message.stats)
                started.set_result(None)
            elif isinstance(message, Refused):
                kind = AnswerError if message.fails else RefusedError
                self._hand_on(message.number, kind(message.message))
                self._sequences.pop(message.number, None)
            elif isinstance(message, PlanIs):
                self._calls.pop(message.call).set_result(message.saved)
            elif isinstance(message, RatesAre):
                self._calls.pop(message.call).set_result(message)
            else:
                assert isinstance(message, Dead)
                self._die(message.message, started)
                return

    def _take_stats(self, stats: Stats) -> None:
        self.stats = stats
        self._on_stats(stats)

    def _hand_on(self, number: int, said: Output | Exception) -> None:
        sequence = self._sequences.get(number)
        if sequence is not None:
            sequence.queue.put_nowait((sequence.index, said))

    async def _watch(self) -> None:
        """Waits for the end of the engine's process."""
        while self._process.is_alive():
            await asyncio.sleep(0.5)
        # Its last words may be on their way.
        await asyncio.sleep(_SECONDS_TO_SAY_WHY)
        if self.dead is None:
            self._die(f"the engine ended with exit code {self._process.exitcode}", None)

    def _die(self, why: str, started: asyncio.Future[None] | None) -> None:
        self.dead = why
        if started is not None and not started.done():
            started.set_exception(EngineError(why))
        for sequence in self._sequences.values():
            sequence.queue.put_nowait((sequence.index, EngineError(why)))
        for call in self._calls.values():
            call.set_exception(EngineError(why))
        self._sequences.clear()
        self._calls.clear()
        self.on_dead(why)


def _start_engine(settings: ServerConfig, folder: str, parent: int) -> None:
    """Runs an engine, in its own process."""
    from distca.serve.engine.engine import run_engine

    run_engine(settings, folder, parent)
