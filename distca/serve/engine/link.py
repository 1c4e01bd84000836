"""Sockets between an engine and its workers: of one machine, or of several with a key of the job.

Between machines they are TCP, encrypted and authenticated by CURVE (ZeroMQ's, of libsodium): both
sides' keys are made of the job's key, so only who has that can connect, and be connected to.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from distca.serve.engine.settings import Nodes


@dataclass(frozen=True)
class Link:
    """Where an engine listens to its workers.

    Attributes:
        endpoint: address as ZeroMQ writes it.
        key: key of the job; None: within a folder that only one user may enter none is needed.
    """

    endpoint: str
    key: bytes | None = field(default=None, repr=False)

    def bind(self, context: zmq.Context) -> Listening:
        """Makes the engine's socket.

        Raises:
            ValueError: the address is in use, or not this machine's.
        """
        guard = None
        listening: zmq.Socket = context.socket(zmq.ROUTER)
        listening.setsockopt(zmq.ROUTER_MANDATORY, 1)
        listening.setsockopt(zmq.IPV6, 1)
        if self.key is not None:
            guard = ThreadAuthenticator(context)
            guard.start()
            guard.configure_curve_callback("*", _Workers(_keys(self.key, "worker")[0]))
            listening.curve_server = True
            listening.curve_publickey, listening.curve_secretkey = _keys(self.key, "engine")
        try:
            listening.bind(self.endpoint)
        except zmq.ZMQError as error:
            listening.close(linger=0)
            if guard is not None:
                guard.stop()
            raise ValueError(
                f"cannot listen on {self.endpoint}: {error.strerror}: choose another "
                "--master-port, or as --master-addr an address of this machine"
            ) from error
        return Listening(listening, guard)

    def connect(self, context: zmq.Context, name: str) -> Any:
        """Makes the socket of a worker or a machine with this name; its owner connects it."""
        connecting = context.socket(zmq.DEALER)
        connecting.setsockopt(zmq.IDENTITY, name.encode())
        connecting.setsockopt(zmq.IPV6, 1)
        if self.key is not None:
            connecting.curve_serverkey = _keys(self.key, "engine")[0]
            connecting.curve_publickey, connecting.curve_secretkey = _keys(self.key, "worker")
        return connecting


def link_of(nodes: Nodes, folder: Path) -> Link:
    """The link of a server's engine; one between machines is at the given address alone.

    Args:
        nodes: machines of the server.
        folder: folder for sockets of one machine.

    Raises:
        ValueError: there is no such address, or it is any.
    """
    if nodes.count == 1:
        return Link(f"ipc://{folder / 'workers'}")
    address, port = nodes.address, nodes.port
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ValueError(
            f"--master-addr {address}: {error.strerror}: give the head's name or address"
        ) from error
    if found in ("0.0.0.0", "::"):
        raise ValueError(f"--master-addr {address}: give one by which nodes reach the head")
    host = f"[{found}]" if ":" in str(found) else found
    return Link(f"tcp://{host}:{port}", nodes.key)


@dataclass(frozen=True)
class Listening:
    """An engine's socket, and who lets workers in.

    Attributes:
        socket: the socket.
        guard: who knows the workers' key; None: all are let in.
    """

    socket: Any
    guard: ThreadAuthenticator | None

    def close(self, linger: int) -> None:
        """Closes it; what was sent last has so many milliseconds to leave."""
        self.socket.close(linger=linger)
        if self.guard is not None:
            self.guard.stop()


class _Workers:
    """Knows workers by their key. See `zmq.auth.Authenticator.configure_curve_callback`."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client may connect."""
        return hmac.compare_digest(key, self._public)


def _keys(key: bytes, role: str) -> tuple[bytes, bytes]:
    """The public and the secret key of one side."""
    made = hmac.new(key, f"distca serve: {role}".encode(), hashlib.sha256).digest()
    secret = z85.encode(made)
    return zmq.curve_public(secret), secret
