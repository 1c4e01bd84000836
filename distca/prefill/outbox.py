"""How a prefill rank sends rows to the processes of engines.

Each process has a connection. `NixlConnection` writes rows into slots of the process's memory; the
process says when it has taken them out. `TcpConnection` sends them as messages. Rows that find no
slot wait in the memory of the host, so nobody waits for an engine. Where NIXL fails, what it did
not write for certain is sent again by TCP, and the process takes each row once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import zmq

from distca.prefill.messages import InSlot, Landing, Receiving, Rows, SlotFree, decoder, encode
from distca.prefill.nixl import NixlAgent, NixlError, NixlWrite, slot_rows
from distca.schedule.serving.handoff.protocol import Transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parcel:
    """Rows with their keys and values, `[rows, heads, head_dim]`."""

    rows: Rows
    keys: torch.Tensor
    values: torch.Tensor


class Connection(Protocol):
    """A way to one process of an engine."""

    def send(self, parcel: Parcel) -> None:
        """Sends rows, now or later. Raises `NixlError` if the process cannot be reached so."""
        ...

    def pump(self) -> None:
        """Sends what waits and can be sent now. Raises `NixlError` as `send` does."""
        ...

    def forget(self, transfer: Transfer) -> None:
        """Drops the rows of a prompt that wait."""
        ...

    def close(self) -> list[Parcel]:
        """Ends the connection; returns what may not have come."""
        ...


@dataclass
class _OnItsWay:
    """Rows whose copies to the host are under way.

    Attributes:
        parcel: rows in memory of the host.
        copied: event that follows the copies; None: the rows were on the host.
    """

    parcel: Parcel
    copied: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        """Whether the copies have ended."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


class TcpConnection:
    """Messages of ZeroMQ, which has a queue and a thread of its own.

    Rows of a GPU are copied to pinned memory on a stream of their own, beside what the GPU
    computes. They are sent once they are there: `pump` looks.

    Args:
        inbox: address of the process.
    """

    def __init__(self, inbox: str) -> None:
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.PUSH)
        # The engine has blocks for all that is sent.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(inbox)
        self._copying: deque[_OnItsWay] = deque()
        self._stream: torch.cuda.Stream | None = None

    def send(self, parcel: Parcel) -> None:
        """See `Connection`."""
        self._copying.append(
            self._copied(parcel) if parcel.keys.is_cuda else _OnItsWay(parcel, None)
        )
        self.pump()

    def pump(self) -> None:
        """See `Connection`."""
        while self._copying and self._copying[0].is_there:
            parcel = self._copying.popleft().parcel
            frames = [_bytes_of(rows).numpy() for rows in (parcel.keys, parcel.values)]
            self._socket.send_multipart([encode(parcel.rows), *frames], copy=False)

    def forget(self, transfer: Transfer) -> None:
        """See `Connection`."""
        kept = (each for each in self._copying if each.parcel.rows.transfer != transfer)
        self._copying = deque(kept)

    def close(self) -> list[Parcel]:
        """See `Connection`."""
        self._copying.clear()
        self._socket.close(linger=0)
        return []

    def _copied(self, parcel: Parcel) -> _OnItsWay:
        """Starts the copies of a parcel to pinned memory."""
        device = parcel.keys.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        copies = []
        with torch.cuda.stream(self._stream):
            for rows in (parcel.keys, parcel.values):
                copy = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                copies.append(copy.copy_(rows, non_blocking=True))
                # Its memory may be given out again while it is still copied.
                rows.record_stream(self._stream)
        return _OnItsWay(Parcel(parcel.rows, *copies), self._stream.record_event())


@dataclass
class _Slot:
    """A slot that is written, or that was not taken yet.

    Attributes:
        rows: its rows.
        write: the write under way, or None.
        written: whether the write has ended.
        taken: whether the process has said that it is free.
    """

    rows: Rows
    write: NixlWrite | None = None
    written: bool = False
    taken: bool = False


class NixlConnection:
    """Writes of NIXL into this rank's slots of a process's memory.

    Args:
        agent: agent of this rank.
        landing: memory of the process.
        rank: number of this rank.
        device: device of the rows.

    Attributes:
        name: name of the process's agent.

    Raises:
        NixlError: the process cannot be reached.
    """

    def __init__(self, agent: NixlAgent, landing: Landing, rank: int, device: torch.device) -> None:
        self.name = landing.name
        self._agent, self._landing = agent, landing
        self._first = landing.senders.index(rank) * landing.slots
        size = landing.slots, landing.slot_bytes
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._free = deque(range(landing.slots))
        self._slots: dict[int, _Slot] = {}
        self._waiting: deque[Parcel] = deque()
        # Of all rows.
        self._head_dim, self._dtype = 0, torch.float32
        agent.connect(landing.metadata)
        self._registered = agent.register(self._memory)

    def send(self, parcel: Parcel) -> None:
        """See `Connection`."""
        self._head_dim, self._dtype = parcel.keys.shape[-1], parcel.keys.dtype
        for part in _parts(parcel, self._landing.slot_bytes):
            if self._free and not self._waiting:
                self._write(part)
            else:
                # The blocks may be another prompt's by then.
                kept = (each.to("cpu", copy=True) for each in (part.keys, part.values))
                self._waiting.append(Parcel(part.rows, *kept))

    def pump(self) -> None:
        """See `Connection`."""
        for number, slot in list(self._slots.items()):
            if slot.written:
                continue
            assert slot.write is not None, "a write that fails at once ends the connection"
            if self._agent.is_written(slot.write):
                slot.written = True
                self._give_back(number)
        while self._waiting and self._free:
            self._write(self._waiting.popleft())

    def taken(self, number: int) -> None:
        """Notes that a slot's rows were taken out."""
        slot = self._slots.get(number - self._first)
        if slot is not None:
            slot.taken = True
            self._give_back(number - self._first)

    def forget(self, transfer: Transfer) -> None:
        """See `Connection`."""
        self._waiting = deque(each for each in self._waiting if each.rows.transfer != transfer)

    def close(self) -> list[Parcel]:
        """See `Connection`."""
        open_ = {number: slot for number, slot in self._slots.items() if not slot.written}
        left = [
            Parcel(slot.rows, *(each.clone() for each in self._rows_of(number, slot.rows)))
            for number, slot in open_.items()
        ]
        ended = [self._agent.give_up(slot.write) for slot in open_.values() if slot.write]
        self._agent.disconnect(self.name)
        # What NIXL may still read stays where it is.
        self._agent.deregister(self._registered, None if all(ended) else self._memory)
        left += self._waiting
        self._slots.clear()
        self._waiting.clear()
        return left

    def _write(self, parcel: Parcel) -> None:
        number = self._free.popleft()
        for memory, rows in zip(
            self._rows_of(number, parcel.rows), (parcel.keys, parcel.values), strict=True
        ):
            memory.copy_(rows)
        if self._memory.is_cuda:
            # NIXL does not know of what is queued on the device.
            torch.cuda.current_stream(self._memory.device).synchronize()
        there = self._first + number
        # It is known before the write begins, so that one which fails at once is sent again.
        slot = self._slots[number] = _Slot(parcel.rows)
        source = self._memory[number][: parcel.keys.nbytes + parcel.values.nbytes]
        message = encode(InSlot(parcel.rows, there))
        slot.write = self._agent.write(source, self._landing, there, message)

    def _rows_of(self, number: int, rows: Rows) -> Iterator[torch.Tensor]:
        """Keys and values of a slot."""
        return slot_rows(self._memory[number], rows, self._head_dim, self._dtype)

    def _give_back(self, number: int) -> None:
        slot = self._slots[number]
        if slot.taken and slot.written:
            del self._slots[number]
            self._free.append(number)


class Outbox:
    """All connections of a rank.

    Args:
        rank: number of the rank.
        device: device of the rows.
        agent: NIXL's agent; None: rows travel by TCP.
    """

    def __init__(self, rank: int, device: torch.device, agent: NixlAgent | None) -> None:
        self._rank, self._device, self._agent = rank, device, agent
        self._connections: dict[str, Connection] = {}
        self._nixl: dict[str, NixlConnection] = {}
        self._decoder = decoder(SlotFree)

    def send(self, to: Receiving, rows: Rows, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Sends rows to a process. They stay as they are from now on."""
        parcel = Parcel(rows, keys, values)
        try:
            self._connection(to).send(parcel)
        except NixlError as error:
            self._by_tcp(to.inbox, error, [parcel])

    def pump(self) -> None:
        """Goes on with what is under way."""
        told = () if self._agent is None else self._agent.notified()
        for name, message in told:
            connection = next((each for each in self._nixl.values() if each.name == name), None)
            if connection is not None:
                try:
                    connection.taken(self._decoder.decode(message).slot)
                except msgspec.MsgspecError as error:
                    logger.warning("a message cannot be read: %s", error)
        for inbox, each in list(self._connections.items()):
            try:
                each.pump()
            except NixlError as error:
                self._by_tcp(inbox, error)

    def sends_later(self, to: Receiving) -> bool:
        """Returns whether rows to a process may be sent by `pump`, after `send`."""
        return to.landing is not None or self._device.type == "cuda"

    def forget(self, receiving: Iterable[Receiving], transfer: Transfer) -> None:
        """Drops the rows of a prompt that wait."""
        for each in receiving:
            if each.inbox in self._connections:
                self._connections[each.inbox].forget(transfer)

    def disconnect(self, inbox: str) -> None:
        """Ends the connection to a process, if there is one."""
        connection = self._connections.pop(inbox, None)
        self._nixl.pop(inbox, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Ends all connections."""
        for inbox in list(self._connections):
            self.disconnect(inbox)

    def _connection(self, to: Receiving) -> Connection:
        if to.inbox not in self._connections:
            if to.landing is None or self._agent is None:
                self._connections[to.inbox] = TcpConnection(to.inbox)
            else:
                made = NixlConnection(self._agent, to.landing, self._rank, self._device)
                self._connections[to.inbox] = self._nixl[to.inbox] = made
        return self._connections[to.inbox]

    def _by_tcp(self, inbox: str, why: NixlError, more: Iterable[Parcel] = ()) -> None:
        """Sends by TCP from now on, and again what may not have come."""
        logger.warning("rows go to %s by TCP from now on: %s", inbox, why)
        failed = self._nixl.pop(inbox, None)
        self._connections[inbox] = TcpConnection(inbox)
        for parcel in (*(failed.close() if failed is not None else ()), *more):
            self._connections[inbox].send(parcel)


def _parts(parcel: Parcel, most: int) -> Iterator[Parcel]:
    """Cuts rows so that keys and values of each part have `most` bytes at most."""
    count = len(parcel.keys)
    rows_a_part = most // (2 * parcel.keys[0].nbytes)
    if count <= rows_a_part:
        yield parcel
        return
    for first in range(0, count, rows_a_part):
        end = min(first + rows_a_part, count)
        rows = msgspec.structs.replace(parcel.rows, pieces=_cut(parcel.rows.pieces, first, end))
        yield Parcel(rows, parcel.keys[first:end], parcel.values[first:end])


def _cut(pieces: Iterable[tuple[int, int]], first: int, end: int) -> list[tuple[int, int]]:
    """Pieces of the rows from `first` to `end`, counted over all pieces."""
    cut, before = [], 0
    for start, stop in pieces:
        low, high = max(first - before, 0), min(end - before, stop - start)
        if low < high:
            cut.append((start + low, start + high))
        before += stop - start
    return cut


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8."""
    return rows.contiguous().view(torch.uint8)
