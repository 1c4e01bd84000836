"""The interface of a transport: a ragged all-to-all whose sizes every rank knows beforehand."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

Direction = Literal["dispatch", "combine"]
"""The way that rows travel: inputs to their servers, results back to the rows' owners."""

DIRECTIONS: tuple[Direction, ...] = ("dispatch", "combine")


class TransportError(RuntimeError):
    """Raised if an exchange cannot complete; the message names the peer, channel and epoch."""


class Channel(NamedTuple):
    """A pair of static buffers, one to send from and one to receive in.

    Exchanges of one channel follow each other; those of different channels may overlap.

    Attributes:
        direction: way that the rows travel.
        slot: number of the call whose rows travel, of a nano-batch.
    """

    direction: Direction
    slot: int

    @property
    def number(self) -> int:
        """Number of the channel, the same on every rank."""
        return self.slot * len(DIRECTIONS) + DIRECTIONS.index(self.direction)


@dataclass(frozen=True)
class ChannelBytes:
    """Capacity of a channel: bytes that a rank may send, and may receive, in one exchange."""

    send: int = 0
    receive: int = 0

    def fits(self, room: ChannelBytes) -> bool:
        """Returns whether buffers of the capacity `room` suffice."""
        return self.send <= room.send and self.receive <= room.receive


@dataclass(frozen=True)
class MessageSizes:
    """The messages of one exchange as one rank sees them, in bytes.

    The same sizes serve all layers, so what follows from them is worked out once.

    Attributes:
        send: bytes to each rank; 0 for this rank itself.
        receive: bytes from each rank; 0 for this rank itself.
        put_at: offset of this rank's message in each rank's receive buffer.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    put_at: tuple[int, ...]

    @cached_property
    def sent(self) -> int:
        """Bytes to all ranks."""
        return sum(self.send)

    @cached_property
    def received(self) -> int:
        """Bytes from all ranks."""
        return sum(self.receive)

    @cached_property
    def outgoing(self) -> tuple[Message, ...]:
        """The messages to other ranks that are not empty."""
        return _messages(self.send)

    @cached_property
    def incoming(self) -> tuple[Message, ...]:
        """The messages from other ranks that are not empty."""
        return _messages(self.receive)

    @cached_property
    def words(self) -> torch.Tensor:
        """Each message's size, its begin among those to send, and `put_at`: int64 `[3, ranks]`."""
        send = torch.tensor(self.send)
        return torch.stack([send, send.cumsum(0) - send, torch.tensor(self.put_at)])


class Message(NamedTuple):
    """A message among all those to send, or all those received; `rank` is the other rank."""

    rank: int
    begin: int
    end: int


def _messages(sizes: tuple[int, ...]) -> tuple[Message, ...]:
    ends = accumulate(sizes)
    return tuple(
        Message(rank, end - nbytes, end)
        for rank, (nbytes, end) in enumerate(zip(sizes, ends, strict=True))
        if nbytes
    )


class Pending(ABC):
    """An exchange that is under way."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Waits for the messages from rank 0, 1, ...: uint8 `[sum(sizes.receive)]`, concatenated.

        The result lies in the channel's buffer: read it before `release`. On a GPU the current
        stream waits, not the CPU. Until `release`, `wait` may be called again.
        """

    @abstractmethod
    def release(self) -> None:
        """Frees the receive buffer: other ranks may send on this channel again."""


class Transport(ABC):
    """A ragged all-to-all between the ranks of one group, which counts the bytes it moves.

    A transport owns the buffers that messages are sent from and received in. `reserve` allocates
    them between training steps; an exchange allocates nothing.

    Args:
        rank: number of this rank in the group.
        world_size: ranks in the group.

    Attributes:
        rank: number of this rank in the group.
        world_size: ranks in the group.
        bytes_sent: bytes that this rank sent to others, by phase.
        bytes_received: bytes that this rank received from others, by phase.
        exchanges_started: number of exchanges started so far.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.bytes_sent: Counter[str] = Counter()
        self.bytes_received: Counter[str] = Counter()
        self.exchanges_started = 0

    @abstractmethod
    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """Allocates the channels' buffers anew, at least of these sizes. Collective.

        Every rank of the group gives the same sizes, and no exchange may be under way.
        """

    @abstractmethod
    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """Returns the send buffer for the messages of the channel's next exchange: uint8
        `[nbytes]`.

        The exchange before must have been waited for.
        """

    def start(self, phase: str, channel: Channel, sizes: MessageSizes) -> Pending:
        """Starts to send the messages to rank 0, 1, ..., which lie concatenated in the staging.

        Collective: every rank of the group starts the channel's exchanges in the same order, also
        a rank with nothing to send, unless the transport is of members only. One exchange of each
        channel may be under way. No sizes are negotiated: all ranks read them off the plan.

        Args:
            phase: name under which the bytes are counted.
            channel: channel of the exchange.
            sizes: sizes of the messages.

        Returns:
            The exchange under way. The staging must stay as it is until `wait` has returned.
        """
        assert sizes.send[self.rank] == 0
        assert sizes.receive[self.rank] == 0
        self.bytes_sent[phase] += sizes.sent
        self.bytes_received[phase] += sizes.received
        self.exchanges_started += 1
        return self._start(channel, sizes)

    @abstractmethod
    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        """Starts an exchange whose bytes are counted already."""

    def check(self, finished: bool) -> None:
        """Raises the error of an exchange that has failed.

        A transport whose `wait` blocks the CPU raises it there, and does nothing here.

        Args:
            finished: look once the current stream has done its work so far; else at once.

        Raises:
            TransportError: an exchange has failed, on this rank or another.
        """
        return

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Guards work whose results may be used only if no exchange in it has failed.

        Raises:
            TransportError: an exchange has failed. What it received is then not-a-number, so this
                error replaces any that the work raised because of that.
        """
        try:
            yield
        except Exception:
            self.check(finished=False)
            raise
        self.check(finished=True)

    @abstractmethod
    def close(self) -> None:
        """Frees what the transport holds. No exchange may follow."""


def first_bytes(buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Returns the part of a channel's buffer that an exchange uses; `reserve` made it large
    enough."""
    assert nbytes <= buffer.numel(), "no room was reserved for this plan"
    return buffer[:nbytes]
