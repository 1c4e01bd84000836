"""The workers of an engine: their processes, what they are told, and whether they are alive."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import zmq

from distca.serve.engine.messages import (
    Beat,
    Done,
    Failed,
    FromWorker,
    Loaded,
    ToWorker,
    decoder,
    encode,
)
from distca.serve.engine.settings import EngineSettings

BEAT_TIMEOUT = 30.0
"""Seconds without a beat after which a worker hangs: long, since a busy machine beats late."""

_SECONDS_TO_SAY_WHY = 0.5


class WorkerError(RuntimeError):
    """Raised if a worker failed, ended or hangs; the message says which, and why."""


class Workers:
    """Processes of this machine, a rank each. They end with the process that made them.

    Args:
        settings: settings of the engine.
        folder: folder for sockets, which only this user may enter.
        poller: poller that is to notice what workers say, and their ends.
    """

    def __init__(self, settings: EngineSettings, folder: Path, poller: zmq.Poller) -> None:
        self._timeout = settings.step_timeout
        self._decoder = decoder(FromWorker)
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        address = f"ipc://{folder / 'workers'}"
        self._socket.bind(address)
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        for rank in range(settings.processes):
            arguments = (settings, rank, str(folder / "store"), address, os.getpid())
            process = context.Process(target=_start_worker, args=arguments, daemon=True)
            process.start()
            poller.register(process.sentinel, zmq.POLLIN)
            self._processes.append(process)
        poller.register(self._socket, zmq.POLLIN)
        self._alive: dict[int, float] = {}
        self._since: float | None = None

    def send(self, message: ToWorker) -> None:
        """Sends a message to all workers."""
        encoded = encode(message)
        for rank in range(len(self._processes)):
            self._socket.send_multipart([f"worker-{rank}".encode(), encoded])

    def begin_step(self) -> None:
        """Notes that an iteration begins."""
        self._since = time.monotonic()

    def end_step(self) -> None:
        """Notes that the iteration has ended."""
        self._since = None

    def receive(self) -> list[Loaded | Done]:
        """Returns what workers said, without waiting.

        Raises:
            WorkerError: one failed, ended or hangs.
        """
        said: list[Loaded | Done] = []
        while self._socket.poll(0):
            _, encoded = self._socket.recv_multipart()
            message = self._decoder.decode(encoded)
            if isinstance(message, Failed):
                # It may have failed since another was killed.
                raise WorkerError(self._killed() or f"rank {message.rank}: {message.message}")
            self._alive[message.rank] = time.monotonic()
            if not isinstance(message, Beat):
                said.append(message)
        self._check()
        return said

    def close(self) -> None:
        """Ends all workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._socket.close(linger=0)

    def _check(self) -> None:
        for rank, process in enumerate(self._processes):
            if not process.is_alive():
                raise WorkerError(self._why_ended(rank))
        now = time.monotonic()
        for rank, alive in self._alive.items():
            if now - alive > BEAT_TIMEOUT:
                raise WorkerError(
                    f"rank {rank} hangs: nothing was heard of it for {now - alive:.0f} s"
                )
        if self._since is not None and now - self._since > self._timeout:
            raise WorkerError(
                f"an iteration took longer than {self._timeout:g} s: raise --step-timeout if it "
                "does not hang"
            )

    def _why_ended(self, rank: int) -> str:
        """Says why a worker ended: by its own words, unless it was killed."""
        if killed := self._killed():
            return killed
        begin = time.monotonic()
        while (left := begin + _SECONDS_TO_SAY_WHY - time.monotonic()) > 0:
            if not self._socket.poll(int(1000 * left)):
                break
            _, encoded = self._socket.recv_multipart()
            message = self._decoder.decode(encoded)
            if isinstance(message, Failed):
                return f"rank {message.rank}: {message.message}"
        return f"rank {rank} ended without a word"

    def _killed(self) -> str | None:
        """Says which worker did not end by itself, if one did not."""
        for rank, process in enumerate(self._processes):
            if not process.is_alive() and process.exitcode:
                why = "killed: is there memory left?" if process.exitcode == -signal.SIGKILL else ""
                return f"rank {rank} ended with exit code {process.exitcode}, {why}".rstrip(", ")
        return None


def _start_worker(
    settings: EngineSettings, rank: int, store: str, address: str, parent: int
) -> None:
    """Runs a worker; torch is imported by it alone."""
    from distca.serve.engine.worker import run_worker

    run_worker(settings, rank, store, address, parent)
