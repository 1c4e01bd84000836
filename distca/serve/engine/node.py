"""The main loop of a machine that has workers alone: it joins the head, and ends with it."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from distca.inference.messages import decoder, encode
from distca.serve.engine.link import link_of
from distca.serve.engine.node_messages import HeadEnds, Join, Joined, NodeEnds, ToNode
from distca.serve.engine.nodes import facts
from distca.serve.engine.processes import WorkerProcesses
from distca.serve.engine.settings import ServerConfig

logger = logging.getLogger("uvicorn.error")

_SECONDS_TO_JOIN = 600.0
_SECONDS_TO_BE_TOLD = 2.0
_POLL_MILLISECONDS = 200
_PING_MILLISECONDS, _SILENCE_MILLISECONDS = 500, 3500
"""Time between signs of life, and that after which a connection without any is closed."""

_REFUSED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
)


class _Ended(Exception):
    """Raised at the end of the node; its message says why, if it was not asked to."""

    def __init__(self, why: str | None) -> None:
        super().__init__(why)
        self.why = why


class Node:
    """A machine's side of its connection to the head, and its workers.

    Args:
        settings: settings of the engine, as this machine was given them.

    Raises:
        ValueError: there is no such address.
    """

    def __init__(self, settings: ServerConfig) -> None:
        self._settings, self._number = settings, settings.nodes.rank
        self._link = link_of(settings.nodes, Path())
        self._head = f"the head at {settings.nodes.address}:{settings.nodes.port}"
        self._context: zmq.Context = zmq.Context()
        # A name of its own: one that is taken would be refused without a word.
        name = f"node-{self._number}-{os.getpid()}-{os.urandom(4).hex()}"
        self._socket = self._link.connect(self._context, name)
        # ZeroMQ's own thread tells and answers them, whatever this process and the engine do.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MILLISECONDS)
        for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL):
            self._socket.setsockopt(option, _SILENCE_MILLISECONDS)
        self._events: Any = self._socket.get_monitor_socket()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        self._decoder = decoder(ToNode)
        self._workers: WorkerProcesses | None = None
        self._connected = False
        self._asked = False

    def run(self) -> str | None:
        """Runs until the head ends, or this machine's workers do.

        Returns:
            Why it ended; None: it was asked to, here or at the head.
        """
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._ask)
        self._socket.connect(self._link.endpoint)
        self._socket.send(encode(Join(self._number, facts(self._settings))))
        logger.info("node %d waits for %s", self._number, self._head)
        begin = time.monotonic()
        try:
            while True:
                self._poller.poll(_POLL_MILLISECONDS)
                self._take_messages()
                self._take_events()
                if self._asked:
                    self._leave("was asked to end", None)
                if self._workers is not None and (ended := self._workers.ended()) is not None:
                    why = self._workers.killed() or f"rank {ended} ended"
                    self._leave(why, why)
                if not self._connected and time.monotonic() - begin > _SECONDS_TO_JOIN:
                    raise _Ended(f"{self._head} was not there for {_SECONDS_TO_JOIN:.0f} s")
        except _Ended as ended:
            return ended.why
        finally:
            if self._workers is not None:
                self._workers.close()
            self._socket.disable_monitor()
            self._context.destroy(linger=0)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _take_messages(self) -> None:
        while self._socket.poll(0):
            message = self._decoder.decode(self._socket.recv())
            if isinstance(message, HeadEnds):
                raise _Ended(message.message)
            if isinstance(message, Joined):
                logger.info("all nodes are there: ranks %s start", self._ranks())
                self._workers = WorkerProcesses(self._settings, self._link, None, self._poller)

    def _ranks(self) -> str:
        own = self._settings.own_processes
        return f"{own.start} to {own.stop - 1}"

    def _take_events(self) -> None:
        """Looks what became of the connection."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            if event in _REFUSED:
                raise _Ended(
                    f"{self._head} refused this node: is --job-key-file the same on all nodes?"
                )
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event == zmq.Event.DISCONNECTED and self._connected:
                self._take_messages()
                raise _Ended(f"{self._head} has ended, or cannot be reached")

    def _leave(self, message: str, why: str | None) -> None:
        """Tells the head, which ends the server."""
        self._socket.send(encode(NodeEnds(self._number, message)))
        end = time.monotonic() + _SECONDS_TO_BE_TOLD
        while self._connected and time.monotonic() < end:
            if self._socket.poll(100) and isinstance(
                self._decoder.decode(self._socket.recv()), HeadEnds
            ):
                break
        raise _Ended(why)
