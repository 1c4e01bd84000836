"""Storms on servers with roles, in real processes: aborts, late messages, silent and dead ranks."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from distca.inference.messages import AddRequest
from distca.serve.api import engine_client
from distca.serve.api.engine_client import EngineClient, EngineError
from distca.serve.engine.settings import ServerConfig
from support.served import are_gone

LATE_KINDS = {"HandoffEvent", "Expect", "First"}
LATE, LATE_SECONDS = 0.01, 3.0
"""Part of the messages of the hand-off that come late, and by how much at most."""


def start_late_engine(settings: ServerConfig, folder: str, parent: int) -> None:
    """Runs an engine some of whose messages come late: the main function of its process."""
    from distca.serve.engine import engine
    from distca.serve.engine.workers import Workers

    class LateWorkers(Workers):
        """Workers that are told late, and heard late."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._chance, self._count = random.Random(0), 0
            self._later: list[tuple[float, int, int | None, Any]] = []

        def _is_late(self, kind: str, rank: int | None, message: Any) -> bool:
            if kind not in LATE_KINDS or self._chance.random() >= LATE:
                return False
            self._count += 1
            due = time.monotonic() + LATE_SECONDS * self._chance.random()
            heapq.heappush(self._later, (due, self._count, rank, message))
            return True

        def post(self, rank: int, encoded: bytes) -> None:
            if not self._is_late(msgspec.msgpack.decode(encoded)[0], rank, encoded):
                super().post(rank, encoded)

        def receive(self) -> list[Any]:
            heard = [e for e in super().receive() if not self._is_late(type(e).__name__, None, e)]
            while self._later and self._later[0][0] <= time.monotonic():
                _, _, rank, message = heapq.heappop(self._later)
                if rank is None:
                    heard.append(message)
                else:
                    super().post(rank, message)
            return heard

    engine.Workers = LateWorkers  # type: ignore[misc]
    engine.run_engine(settings, folder, parent)


@dataclass
class Weathered:
    """What became of a storm.

    Attributes:
        answers: tokens of the requests that were answered.
        errors: what was said to those that were not, without those that were aborted.
        left: referenced blocks of each rank after the storm.
        retries: hand-offs that were tried again.
        dead: what the engine said at its end, once a rank was killed.
        ended: times at which each request was asked, and had its last word.
        seconds: longest from the kill, or from being asked after it, to the last word to a request.
        gone: whether all processes ended after that.
    """

    answers: dict[int, list[int]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    retries: int = 0
    dead: str | None = None
    ended: dict[int, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    gone: bool = False


class Storm:
    """A server in a storm.

    Args:
        settings: settings of the engine.
        seed: seed of everything that is random.
    """

    def __init__(self, settings: ServerConfig, seed: int) -> None:
        self._settings, self._chance = settings, random.Random(seed)
        self._client = EngineClient(settings)

    def weather(self, submits: Sequence[tuple], gap: float) -> Weathered:
        """Has requests answered, with a decode rank stopped; then again, with a rank killed."""
        return asyncio.run(self._weather(submits, gap))

    async def _weather(self, submits: Sequence[tuple], gap: float) -> Weathered:
        whole = engine_client._start_engine
        engine_client._start_engine = start_late_engine
        try:
            await self._client.start()
        finally:
            engine_client._start_engine = whole
        found, pids = Weathered(), self._pids()
        try:
            stopped = self._chance.choice(pids[self._settings.roles.prefill :])  # type: ignore[union-attr]
            await asyncio.gather(
                *self._requests(submits, gap, found), self._stop(stopped, gap * len(submits))
            )
            found.left = await self._blocks_left()
            found.retries = self._client.stats.preemptions  # type: ignore[union-attr]
            killed = self._chance.randrange(len(pids))
            after = self._chance.uniform(0, gap * len(submits))
            again = Weathered()
            kill = self._kill(pids[killed], after)
            since, *_ = await asyncio.gather(kill, *self._requests(submits, gap, again))
            found.seconds = max(end - max(asked, since) for asked, end in again.ended.values())
            found.dead = self._client.dead
            found.errors |= {n: each for n, each in again.errors.items() if each != found.dead}
            wanted = f"rank {killed} ended with exit code -9"
            assert found.dead is not None
            assert wanted in found.dead, found.dead
        finally:
            await self._client.close()
        found.gone = are_gone(pids, 20)
        return found

    def _pids(self) -> list[int]:
        """Processes of the ranks, in their order."""
        engine = Path(f"/proc/{self._client._process.pid}/task")
        children = [int(c) for t in engine.glob("*/children") for c in t.read_text().split()]
        return [
            pid
            for pid in sorted(children)
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def _requests(self, submits: Sequence[tuple], gap: float, found: Weathered) -> list[Any]:
        """Requests one after another, of which half are aborted at some moment."""
        aborted = {*self._chance.sample(range(len(submits)), len(submits) // 2)}
        return [
            self._ask(
                submit,
                place * gap,
                self._chance.random() * gap * 20 if place in aborted else None,
                found,
            )
            for place, submit in enumerate(submits)
        ]

    async def _ask(
        self, submit: tuple, arrival: float, aborted: float | None, found: Weathered
    ) -> None:
        number, _, prompt, sampling, penalties = submit
        await asyncio.sleep(arrival)
        asked = time.monotonic()

        async def answer() -> None:
            told: list[int] = []
            try:
                asked = [AddRequest(0, 0, prompt, sampling, penalties)]
                async with contextlib.aclosing(self._client.answer(asked, lambda _: None)) as said:
                    async for _, output in said:
                        told.append(output.token)
            except (EngineError, ValueError) as error:
                found.errors[number] = str(error)
            else:
                found.answers[number] = told

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer(), aborted)
        found.ended[number] = asked, time.monotonic()

    async def _stop(self, pid: int, during: float) -> None:
        """Lets a decode rank be silent for longer than a lease."""
        await asyncio.sleep(self._chance.uniform(0, during))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * self._settings.roles.lease)  # type: ignore[union-attr]
        os.kill(pid, signal.SIGCONT)

    async def _kill(self, pid: int, after: float) -> float:
        await asyncio.sleep(after)
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    async def _blocks_left(self) -> list[int]:
        """Referenced blocks of each rank, once nothing changes any more."""
        end = time.monotonic() + 4 * self._settings.roles.lease  # type: ignore[union-attr]
        while True:
            await self._client.reset_cache()
            await asyncio.sleep(0.1)
            left = [rank.referenced for rank in self._client.stats.ranks]  # type: ignore[union-attr]
            if not any(left) or time.monotonic() > end:
                return left
