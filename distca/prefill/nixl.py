"""NIXL, NVIDIA's library that moves memory between machines: an agent of this process.

It has no thread of its own: whatever is under way goes on while it is asked what has come.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Iterator
from typing import Protocol

import torch

from distca.prefill.messages import Landing, Rows

logger = logging.getLogger(__name__)


class NixlError(RuntimeError):
    """Raised if NIXL cannot be used here, or not with a peer any more; the message says why."""


class NixlWrite(Protocol):
    """A write that has begun, as NIXL has it."""

    def release(self) -> object:
        """Ends it, or forgets it once it has ended."""
        ...


class NixlAgent:
    """An agent; one thread at a time may use it.

    Attributes:
        name: name that no other agent has.

    Raises:
        NixlError: NIXL is not installed, or cannot start here.
    """

    def __init__(self) -> None:
        self.name = f"distca-{uuid.uuid4().hex}"
        # It would write to this process's output.
        logging.getLogger("nixl").setLevel(logging.WARNING)
        try:
            from nixl import _bindings
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise NixlError(f"NIXL is not installed here ({error})") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        named = vars(_bindings).values()
        kinds = [each for each in named if isinstance(each, type) and issubclass(each, Exception)]
        self._errors: tuple[type[Exception], ...] = (RuntimeError, *kinds)
        try:
            config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = nixl_agent(self.name, config)
        except self._errors as error:
            raise NixlError(f"NIXL cannot start here: {error}") from error
        if "UCX" not in self._agent.backends:
            raise NixlError("NIXL has no UCX here")
        self._kept: list[tuple[object, torch.Tensor]] = []

    @property
    def metadata(self) -> bytes:
        """What others need to know to connect, and to write to what is registered by now."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def register(self, memory: torch.Tensor) -> object:
        """Lets NIXL read and write memory.

        Raises:
            NixlError: it cannot.
        """
        try:
            return self._agent.register_memory([memory])
        except self._errors as error:
            raise NixlError(f"NIXL cannot register {memory.nbytes:,} bytes: {error}") from error

    def deregister(self, registered: object, memory: torch.Tensor | None = None) -> None:
        """Undoes `register`: what peers still write to the memory fails on their side.

        Args:
            registered: what `register` has returned.
            memory: what is kept, since a write that reads it could not be ended.
        """
        if memory is not None:
            self._kept.append((registered, memory))
            return
        try:
            self._agent.deregister_memory(registered)
        except self._errors as error:
            logger.warning("NIXL keeps memory: %s", error)

    def connect(self, metadata: bytes) -> str:
        """Gets to know another agent; returns its name.

        Raises:
            NixlError: it cannot be reached.
        """
        try:
            name: str | bytes = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise NixlError(f"the other agent of NIXL cannot be reached: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def disconnect(self, name: str) -> None:
        """Forgets another agent, which may be gone."""
        try:
            self._agent.remove_remote_agent(name)
        except self._errors:
            # It has not connected yet, or has disconnected.
            return

    def notify(self, name: str, message: bytes) -> None:
        """Sends a message to another agent.

        Raises:
            NixlError: it cannot be reached.
        """
        try:
            self._agent.send_notif(name, message)
        except self._errors as error:
            raise NixlError(f"the other agent of NIXL cannot be reached: {error}") from error

    def notified(self) -> list[tuple[str, bytes]]:
        """Returns the messages that have come, with the names of their senders."""
        return [
            (name.decode() if isinstance(name, bytes) else name, message)
            for name, messages in self._agent.get_new_notifs().items()
            for message in messages
        ]

    def write(self, source: torch.Tensor, landing: Landing, slot: int, message: bytes) -> NixlWrite:
        """Begins to write memory into a slot; the message follows the bytes.

        Args:
            source: registered memory, which stays as it is until the write has ended.
            landing: what to write to, of an agent that is connected.
            slot: number of the slot.
            message: notification that the other agent gets when the write has ended.

        Returns:
            The write, for `is_written`.

        Raises:
            NixlError: the other agent cannot be reached.
        """
        to = landing.address + slot * landing.slot_bytes
        kind = "DRAM" if landing.device < 0 else "VRAM"
        agent = self._agent
        try:
            there = agent.get_xfer_descs([(to, source.nbytes, max(landing.device, 0))], kind)
            here = agent.get_xfer_descs([source])
            handle = agent.initialize_xfer("WRITE", here, there, landing.name, message)
            state = agent.transfer(handle)
        except self._errors as error:
            raise NixlError(f"a write of NIXL fails: {error}") from error
        if state == "ERR":
            raise NixlError("a write of NIXL fails")
        return handle

    def is_written(self, handle: NixlWrite) -> bool:
        """Returns whether a write has ended, and forgets it then.

        Raises:
            NixlError: it has failed.
        """
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                handle.release()
        except self._errors as error:
            raise NixlError(f"a write of NIXL fails: {error}") from error
        if state == "ERR":
            raise NixlError("a write of NIXL fails")
        return bool(state == "DONE")

    def give_up(self, handle: NixlWrite) -> bool:
        """Ends a write; returns whether nothing of it is under way any more."""
        try:
            handle.release()
        except self._errors:
            # NIXL tries again when the agent ends.
            return False
        return True


def slot_rows(
    slot: torch.Tensor, rows: Rows, head_dim: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Keys and values of a slot, which they share.

    Args:
        slot: memory of the slot, uint8 `[bytes]`.
        rows: what is in it.
        head_dim: numbers of a head.
        dtype: dtype of keys and values.
    """
    shape = rows.count, rows.heads, head_dim
    size = math.prod(shape) * dtype.itemsize
    for start in (0, size):
        yield slot[start : start + size].view(dtype).view(shape)
