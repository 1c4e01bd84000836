"""The interface of a transport: a ragged all-to-all whose sizes every rank knows beforehand."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Way = Literal["to servers", "to owners"]
"""Rows go to their servers, and what servers made of them goes back to the rows' owners."""

WAYS: tuple[Way, ...] = ("to servers", "to owners")


class TransportError(RuntimeError):
    """An exchange cannot be completed; the message names the peer, the channel and the epoch."""


class Channel(NamedTuple):
    """What has static buffers of its own; its exchanges follow each other.

    Attributes:
        way: of the rows.
        slot: of the call: a head group of a nano-batch. Exchanges of different slots may be under
            way together.
    """

    way: Way
    slot: int


@dataclass(frozen=True)
class ChannelBytes:
    """How many bytes a rank may send, and may receive, in one exchange of a channel."""

    send: int = 0
    receive: int = 0

    def fits(self, room: ChannelBytes) -> bool:
        """Whether `room` holds this."""
        return self.send <= room.send and self.receive <= room.receive


@dataclass(frozen=True)
class MessageSizes:
    """The messages of one exchange as one rank sees them, in bytes.

    Attributes:
        send: to each rank; 0 for this rank itself.
        receive: from each rank; 0 for this rank itself.
        put_at: where this rank's message begins in what each rank receives.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    put_at: tuple[int, ...]


class Pending(ABC):
    """An exchange that is under way."""

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """What was received: uint8 `[sum(sizes.receive)]`, from rank 0, 1, ... one after the other.

        It lies in the channel's buffer: read it before `release`. On a GPU the current stream
        waits for it, not the CPU. It may be asked for again until then.
        """

    @abstractmethod
    def release(self) -> None:
        """What was received is no longer needed: others may send on this channel again."""


class Transport(ABC):
    """A ragged all-to-all between the ranks of one group, which counts what it moved.

    It owns the buffers that messages are sent from and received in. They are allocated by
    `reserve`, between steps, and never in an exchange.

    Args:
        rank: this rank's number in the group.
        world_size: ranks in the group.

    Attributes:
        rank: as given.
        world_size: as given.
        bytes_sent: bytes that this rank sent to others, by phase.
        bytes_received: bytes that this rank received from others, by phase.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.bytes_sent: Counter[str] = Counter()
        self.bytes_received: Counter[str] = Counter()

    @abstractmethod
    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """Allocates the channels' buffers anew, at least of these sizes; nothing may be under way.

        Collective: every rank of the group calls it with the same sizes.
        """

    @abstractmethod
    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """Where the messages of the channel's next exchange are to be put: uint8 `[nbytes]`.

        The exchange before it must have been waited for.
        """

    def start(self, phase: str, channel: Channel, sizes: MessageSizes) -> Pending:
        """Sends what is in the channel's staging: the messages to rank 0, 1, ... in turn.

        Collective: every rank of the group starts the channel's exchanges in the same order, also
        those with nothing to send. One exchange of each channel may be under way. No sizes are
        negotiated: all ranks read them off the plan.

        Args:
            phase: the name under which the bytes are counted.
            channel: whose exchange it is.
            sizes: of the messages.

        Returns:
            What can be waited for. The staging must stay as it is until then.
        """
        assert sizes.send[self.rank] == 0
        assert sizes.receive[self.rank] == 0
        self.bytes_sent[phase] += sum(sizes.send)
        self.bytes_received[phase] += sum(sizes.receive)
        return self._start(channel, sizes)

    @abstractmethod
    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        """Does what `start` says."""

    def check(self, finished: bool = True) -> None:
        """Looks for exchanges that have failed.

        Where `wait` makes the CPU wait it tells of them itself, and nothing is left to do here.

        Args:
            finished: when all is done that the current stream was given until now; else at once.

        Raises:
            TransportError: one has failed, on this rank or another.
        """
        return

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Around work whose results may be used only if no exchange in it has failed.

        Raises:
            TransportError: one has failed. What was received is then not-a-number, so an error that
                comes of that first gives way to this one.
        """
        try:
            yield
        except Exception:
            self.check(finished=False)
            raise
        self.check()

    @abstractmethod
    def close(self) -> None:
        """Gives back what the transport holds; call it when no exchange will follow."""


def first_bytes(buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The part of a channel's buffer that an exchange needs; `reserve` made it large enough."""
    assert nbytes <= buffer.numel(), "no room was reserved for this plan"
    return buffer[:nbytes]
