"""How a process of an engine gets rows: messages come to it, or ranks write into its memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import zmq

from distca.prefill.messages import InSlot, Landing, Rows, SlotFree, decoder, encode
from distca.prefill.nixl import NixlAgent, NixlError, slot_rows

logger = logging.getLogger(__name__)

MOST_SLOT_BYTES = 4 << 20
"""Bytes of a slot, where there is room for two such slots of each rank."""


@dataclass(frozen=True)
class RowForm:
    """Form of keys and values.

    Attributes:
        heads: key-value heads of the model that a process wants.
        head_dim: numbers of a head.
        dtype: their dtype.
    """

    heads: range
    head_dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Heads, and numbers of a head."""
        return len(self.heads), self.head_dim

    def bytes_of(self, rows: Rows) -> int:
        """Bytes of keys, or of values.

        Raises:
            ValueError: they are of other heads.
        """
        if not self.heads.start <= rows.first_head < rows.of_heads.stop <= self.heads.stop:
            raise ValueError(f"rows of the heads {rows.of_heads} are not of {self.heads}")
        return rows.count * rows.heads * self.head_dim * self.dtype.itemsize


class Arrival(Protocol):
    """Rows that have come."""

    @property
    def rows(self) -> Rows:
        """Which they are."""
        ...

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, `[rows, heads, head_dim]`, until `done`."""
        ...

    def done(self) -> None:
        """Says that nobody reads them any more."""
        ...


@dataclass(frozen=True)
class _Frames:
    """Rows of a message."""

    rows: Rows
    frames: Sequence[bytes]
    form: RowForm

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.rows.count, self.rows.heads, self.form.head_dim
        keys, values = (
            torch.frombuffer(bytearray(frame), dtype=self.form.dtype).view(shape)
            for frame in self.frames
        )
        return keys, values

    def done(self) -> None:
        """Does nothing."""


class TcpInbox:
    """Messages that come to an address.

    Args:
        host: address of this machine.
        form: form of the rows.

    Attributes:
        socket: where they come.
        address: address for the ranks.
    """

    def __init__(self, host: str, form: RowForm) -> None:
        self.socket: zmq.Socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        port: int = self.socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._form, self._decoder = form, decoder(Rows)

    def receive(self) -> Arrival:
        """Returns the rows of the next message.

        Raises:
            ValueError: it cannot be read.
        """
        header, *frames = self.socket.recv_multipart()
        rows: Rows = self._decoder.decode(header)
        size = self._form.bytes_of(rows)
        if [len(frame) for frame in frames] != [size, size] or not size:
            raise ValueError(f"rows {rows.pieces} are not two frames of {size} bytes")
        return _Frames(rows, frames, self._form)

    def close(self) -> None:
        """Ends it."""
        self.socket.close(linger=0)


@dataclass(frozen=True)
class _InSlot:
    """Rows of a slot."""

    landing: NixlLanding
    sender: str
    rows: Rows
    slot: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.landing.read(self.slot, self.rows)

    def done(self) -> None:
        self.landing.free(self.sender, self.slot)


class NixlLanding:
    """Memory into which ranks write.

    Args:
        agent: agent of this process, which is its alone.
        ranks: what NIXL needs to know of each rank that sends rows, by its number.
        form: form of the rows.
        device: device on which they are wanted.
        size: bytes of the memory, at most.

    Attributes:
        message: what ranks need to know of it.

    Raises:
        NixlError: NIXL cannot be used so.
    """

    def __init__(
        self,
        agent: NixlAgent,
        ranks: Mapping[int, bytes],
        form: RowForm,
        device: torch.device,
        size: int,
    ) -> None:
        self._agent, self._form = agent, form
        row = 2 * math.prod(form.shape) * form.dtype.itemsize
        slot = min(MOST_SLOT_BYTES, size // (2 * len(ranks))) // row * row
        if not slot:
            raise NixlError(
                f"{size:,} bytes of memory for NIXL are less than two rows of {row:,} bytes for "
                f"each of {len(ranks)} ranks"
            )
        slots = size // (slot * len(ranks))
        self._memory = torch.empty((len(ranks) * slots, slot), dtype=torch.uint8, device=device)
        self._registered = agent.register(self._memory)
        self._ranks = [agent.connect(each) for each in ranks.values()]
        self._decoder, self._closed = decoder(InSlot), False
        at, number = self._memory.data_ptr(), device.index or 0 if device.type == "cuda" else -1
        senders = tuple(ranks)
        self.message = Landing(agent.name, agent.metadata, at, number, slot, slots, senders)

    def receive(self) -> Iterator[Arrival]:
        """Returns the rows that have come since the last call, in their order."""
        for sender, message in self._agent.notified():
            try:
                told: InSlot = self._decoder.decode(message)
                self._check(told)
            except (msgspec.MsgspecError, ValueError) as error:
                logger.warning("a message cannot be read: %s", error)
                continue
            yield _InSlot(self, sender, told.rows, told.slot)

    def read(self, slot: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values that are in a slot."""
        keys, values = slot_rows(self._memory[slot], rows, self._form.head_dim, self._form.dtype)
        return keys, values

    def wait_for_device(self) -> None:
        """Waits until what was queued on the device has read the slots."""
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()

    def free(self, sender: str, slot: int) -> None:
        """Lets a rank write to a slot again."""
        if self._closed:
            return
        try:
            self._agent.notify(sender, encode(SlotFree(slot)))
        except NixlError as error:
            # It is gone, or sends by TCP from now on.
            logger.debug("%s", error)

    def close(self) -> None:
        """Ends it: what ranks still write does not come."""
        self._closed = True
        for each in self._ranks:
            self._agent.disconnect(each)
        self._agent.deregister(self._registered)

    def _check(self, told: InSlot) -> None:
        size = 2 * self._form.bytes_of(told.rows)
        if not 0 <= told.slot < len(self._memory) or not 0 < size <= self._memory.shape[1]:
            raise ValueError(f"slot {told.slot} does not have {size} bytes")
