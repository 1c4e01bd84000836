"""The store by which ranks on several machines find each other, kept by the engine.

torch's own, over TCP, listens on all addresses and to everyone; this one is on the engine's link.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import zmq

from distca.inference.messages import decoder, encode
from distca.serve.engine.link import Link
from distca.serve.engine.node_messages import StoreCall, StoreReply

_WAITING = 0.02


class EngineStore(dist.Store):  # type: ignore[name-defined,misc]
    """A worker's side of the store.

    Args:
        link: engine's link.
        name: name of this worker's socket.
        timeout: time limit of a wait for a key.
    """

    def __init__(self, link: Link, name: str, timeout: timedelta) -> None:
        super().__init__()
        self._link, self._name, self._limit = link, name, timeout
        self._socket: Any = link.connect(zmq.Context(), name)
        self._socket.connect(link.endpoint)
        self._decoder = decoder(StoreReply)
        # Threads of process groups call it, too.
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value."""
        self._call(StoreCall("set", [key], _as_bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits for a key, and returns its value."""
        self.wait([key])
        return self._call(StoreCall("get", [key])).value

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Writes a value where the expected one is, or none is expected; returns what is there."""
        call = StoreCall("compare_set", [key], _as_bytes(value), _as_bytes(expected))
        return self._call(call).value

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which begins at 0, and returns the sum."""
        return self._call(StoreCall("add", [key], amount=amount)).number

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._call(StoreCall("check", list(keys))).found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for keys.

        Raises:
            RuntimeError: they don't come in time.
        """
        end = time.monotonic() + (timeout or self._limit).total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise RuntimeError(f"{', '.join(keys)} did not come in time: does a rank hang?")
            time.sleep(_WAITING)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it was there."""
        return self._call(StoreCall("delete", [key])).found

    def num_keys(self) -> int:
        """Number of keys."""
        return self._call(StoreCall("count", [])).number

    def has_extended_api(self) -> bool:
        """Whether there are calls of several keys at once: there are not."""
        return False

    # As torch's C++ calls them.
    deleteKey, getNumKeys, hasExtendedApi = delete_key, num_keys, has_extended_api

    def _call(self, call: StoreCall) -> StoreReply:
        with self._lock:
            self._socket.send(encode(call))
            if not self._socket.poll(int(1000 * self._limit.total_seconds())):
                raise RuntimeError("the engine does not answer")
            return self._decoder.decode(self._socket.recv())  # type: ignore[no-any-return]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
