"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket

_PORTS = range(12_000, 32_000)
"""The system gives others to connections, which could take a port before a server listens there."""


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    # Not by a seed: other processes ask, too.
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("100 ports are taken")
