"""The machines of a server as its head sees them: who has joined, and who is still there."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import fields

from distca.serve.engine.node_messages import (
    AreYouThere,
    FromNode,
    HeadEnds,
    Join,
    Joined,
    NodeEnds,
    ToNode,
)
from distca.serve.engine.settings import ServerConfig

_PROBE_SECONDS = 0.5
"""Seconds between messages by which the head notices that a connection was closed."""

_OWN = frozenset({"model", "nodes"})
_LONG = 60


class NodeError(RuntimeError):
    """Raised if a machine is lost, leaves or was started otherwise; the message says which."""


class Unreachable(Exception):
    """Raised if nobody is connected by a name."""


def facts(settings: ServerConfig) -> dict[str, str]:
    """What must be alike on all machines, by name; the model's folder may lie elsewhere."""
    found = {"nnodes": str(settings.nodes.count)}
    for each in fields(settings):
        if each.name not in _OWN:
            value = repr(getattr(settings, each.name))
            known = "model" if each.name == "salt" else each.name
            if len(value) > _LONG or known == "model":
                value = hashlib.sha256(value.encode()).hexdigest()[:12]
            found[known] = value
    return found


class OtherNodes:
    """All machines but the head.

    Args:
        settings: settings of the engine.
        send: sends a message to the machine whose socket has this name; raises `Unreachable`.
    """

    def __init__(self, settings: ServerConfig, send: Callable[[bytes, ToNode], None]) -> None:
        self._settings, self._send = settings, send
        self._names: dict[int, bytes] = {}
        self._probed = 0.0

    @property
    def missing(self) -> int:
        """Machines that have not joined yet."""
        return self._settings.nodes.count - 1 - len(self._names)

    def take(self, name: bytes, message: FromNode) -> bool:
        """Takes what a machine says; returns whether it was the last that was missing.

        Raises:
            NodeError: it leaves, or was started otherwise than the head.
        """
        if isinstance(message, NodeEnds):
            raise NodeError(f"node {message.node}: {message.message}")
        assert isinstance(message, Join)
        if message.node in self._names or not 0 < message.node < self._settings.nodes.count:
            self._end(
                name,
                f"--node-rank {message.node}: give each node its own, 1 to "
                f"{self._settings.nodes.count - 1}, beside the head's 0",
            )
            return False
        if unlike := self._unlike(message):
            self._end(name, unlike)
            raise NodeError(unlike)
        self._names[message.node] = name
        if self.missing:
            return False
        self._tell(Joined())
        return True

    def check(self) -> None:
        """Looks who is still there.

        Raises:
            NodeError: a machine is lost.
        """
        now = time.monotonic()
        if now - self._probed > _PROBE_SECONDS:
            self._probed = now
            self._tell(AreYouThere())

    def end(self, why: str | None) -> None:
        """Tells all machines that the server ends."""
        for name in self._names.values():
            self._end(name, why)

    def _unlike(self, join: Join) -> str | None:
        """Says what a machine has other than the head, if anything."""
        ours = facts(self._settings)
        for name in ours.keys() | join.facts.keys():
            here, there = ours.get(name), join.facts.get(name)
            if here != there:
                return (
                    f"node {join.node} was started with {name} {there}, and the head with {here}: "
                    "start all nodes with the same model and flags"
                )
        return None

    def _tell(self, message: ToNode) -> None:
        for node, name in self._names.items():
            try:
                self._send(name, message)
            except Unreachable:
                raise NodeError(f"node {node} is lost: its connection is closed") from None

    def _end(self, name: bytes, why: str | None) -> None:
        try:
            self._send(name, HeadEnds(why))
        except Unreachable:
            # It has ended by itself.
            return
