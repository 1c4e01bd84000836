"""The workers of an engine: what they are told, what they say, and whether they are alive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import zmq

from distca.inference.messages import ExecuteBatch, Message, decoder, encode
from distca.serve.engine.backlog import Backlog
from distca.serve.engine.kept_keys import KeptKeys
from distca.serve.engine.link import link_of
from distca.serve.engine.messages import Beat, Failed, ToWorker
from distca.serve.engine.node_messages import (
    Join,
    NodeEnds,
    StoreCall,
    ToHead,
)
from distca.serve.engine.nodes import NodeError, OtherNodes, Unreachable
from distca.serve.engine.processes import WorkerProcesses
from distca.serve.engine.settings import ServerConfig
from distca.serve.handoff.messages import FromRoles

BEAT_TIMEOUT = 30.0
"""Seconds without a beat after which a worker hangs: long, since a busy machine beats late."""

_SECONDS_TO_SAY_WHY = 0.5
_SECONDS_TO_NOTICE = 1.5
_MILLISECONDS_TO_LEAVE = 500


class WorkerError(RuntimeError):
    """Raised if a worker failed, ended or hangs; the message says which, and why."""


class Workers:
    """Workers of all ranks: processes of this machine, and others' once all machines are there.

    Args:
        settings: settings of the engine.
        folder: folder for sockets, which only this user may enter.
        poller: poller that is to notice what workers say, and their ends.
        clock: seconds since some moment.

    Raises:
        ValueError: other machines cannot reach this one by the address that is given.
    """

    def __init__(
        self,
        settings: ServerConfig,
        folder: Path,
        poller: zmq.Poller,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._folder, self._poller = settings, folder, poller
        self._clock = clock
        self._decoder = decoder(ToHead | FromRoles)
        self._link = link_of(settings.nodes, folder)
        self._listening = self._link.bind(zmq.Context.instance())
        self._socket: zmq.Socket = self._listening.socket
        poller.register(self._socket, zmq.POLLIN)
        self._kept, self._backlog = KeptKeys(), Backlog(settings.processes)
        self._nodes = OtherNodes(settings, self._tell)
        self._own: WorkerProcesses | None = None
        if not self._nodes.missing:
            self._start()
        self._alive: dict[int, float] = {}
        self._since: float | None = None

    def _start(self) -> None:
        several = self._settings.nodes.count > 1
        store = None if several else self._folder / "store"
        self._own = WorkerProcesses(self._settings, self._link, store, self._poller)

    def send(self, message: ToWorker) -> None:
        """Sends a message to all workers."""
        encoded = encode(message)
        for rank in range(self._settings.processes):
            self.post(rank, encoded)

    def post(self, rank: int, encoded: bytes) -> None:
        """Sends an encoded message to one worker."""
        try:
            self._socket.send_multipart([f"worker-{rank}".encode(), encoded])
        except zmq.ZMQError as error:
            # It has ended: `receive` says why.
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def start(self, iteration: ExecuteBatch, parts: Container[int]) -> None:
        """Tells the workers that have a part in an iteration of it, and others in time."""
        for rank, encoded in self._backlog.tell(iteration, parts):
            self.post(rank, encoded)

    def begin_step(self) -> None:
        """Notes that an iteration begins."""
        self._since = self._clock()

    def end_step(self) -> None:
        """Notes that the iteration has ended."""
        self._since = None

    def receive(self) -> list[Any]:
        """Returns what workers said, without waiting.

        Raises:
            WorkerError: one failed, ended or hangs, or a machine is lost.
        """
        try:
            said = self._receive()
            self._nodes.check()
        except NodeError as error:
            raise WorkerError(str(error)) from None
        self._check()
        return said

    def _receive(self) -> list[Any]:
        said: list[Any] = []
        while self._socket.poll(0):
            name, encoded = self._socket.recv_multipart()
            message = self._decoder.decode(encoded)
            if isinstance(message, StoreCall):
                with contextlib.suppress(Unreachable):
                    self._tell(name, self._kept.answer(message))
            elif isinstance(message, Join | NodeEnds):
                if self._nodes.take(name, message):
                    self._start()
            elif isinstance(message, Failed):
                raise WorkerError(self._why_failed(message))
            else:
                self._alive[message.rank] = self._clock()
                if not isinstance(message, Beat):
                    said.append(message)
        return said

    def close(self, why: str | None) -> None:
        """Ends all workers, and tells other machines why."""
        self._nodes.end(why)
        if self._own is not None:
            self._own.close()
        self._listening.close(_MILLISECONDS_TO_LEAVE)

    def _tell(self, name: bytes, message: Message) -> None:
        try:
            self._socket.send_multipart([name, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable from None

    def _check(self) -> None:
        if self._own is not None and (ended := self._own.ended()) is not None:
            raise WorkerError(self._why_ended(ended))
        now = self._clock()
        for rank, alive in self._alive.items():
            if now - alive > BEAT_TIMEOUT:
                raise WorkerError(
                    f"rank {rank} hangs: nothing was heard of it for {now - alive:.0f} s"
                )
        timeout = self._settings.step_timeout
        if self._since is not None and now - self._since > timeout:
            raise WorkerError(
                f"an iteration took longer than {timeout:g} s: raise --step-timeout if it does "
                "not hang"
            )

    def _why_failed(self, failed: Failed) -> str:
        """Says why a worker failed: it may be since another was killed, or a machine is lost."""
        why = f"rank {failed.rank}: {failed.message}"
        # A process that is killed closes its connections some time before it has ended.
        if self._settings.nodes.count == 1:
            return self._killed(_SECONDS_TO_SAY_WHY) or why
        end = time.monotonic() + _SECONDS_TO_NOTICE
        while time.monotonic() < end:
            if killed := self._killed():
                return killed
            if self._socket.poll(10):
                name, encoded = self._socket.recv_multipart()
                message = self._decoder.decode(encoded)
                if isinstance(message, NodeEnds):
                    self._nodes.take(name, message)
            self._nodes.check()
        return why

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

    def _killed(self, seconds: float = 0.0) -> str | None:
        return None if self._own is None else self._own.killed(seconds)
