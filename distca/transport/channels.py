"""What transports with the protocol of `protocol/exchange.h` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distca.transport.base import WAYS, Channel, ChannelBytes

MAX_HEAD_GROUPS = 8
"""Of a nano-batch. What it costs is flags alone: a few lines of memory for each rank."""
SLOTS = 2 * MAX_HEAD_GROUPS
CHANNELS = len(WAYS) * SLOTS

ARENA_ALIGNMENT = 4096
"""Bytes; a page of a CPU."""

# `Outcome` in words.h.
DONE, NOT_YET, TIMED_OUT, DIED, LEFT, ABORTED = range(6)


def channel_number(channel: Channel) -> int:
    """Which of the control page's channels it is."""
    assert 0 <= channel.slot < SLOTS
    return channel.slot * len(WAYS) + WAYS.index(channel.way)


def _channel_of(number: int) -> Channel:
    """The inverse of `channel_number`."""
    return Channel(WAYS[number % len(WAYS)], number // len(WAYS))


def arena_offsets(sizes: Mapping[Channel, ChannelBytes]) -> tuple[dict[Channel, int], int]:
    """Where each channel's arena begins in every rank's memory, and the size of all, in bytes."""
    begins, end = {}, 0
    for channel, room in sizes.items():
        begins[channel] = end
        end += -(-room.receive // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
    return begins, end


class Failure(NamedTuple):
    """Why an exchange ended before it was complete: `Failure` in words.h."""

    outcome: int
    peer: int
    sending: int
    channel: int
    epoch: int
    abort: int

    def describe(self, rank: int, timeout_seconds: float) -> str:
        """What went wrong, in words.

        Args:
            rank: whose failure it is.
            timeout_seconds: how long was waited.
        """
        channel = _channel_of(self.channel)
        waited = "room at" if self.sending else "the message of"
        text = (
            f"rank {rank} waited for {waited} rank {self.peer} in exchange {self.epoch} of "
            f"channel '{channel.way}' {channel.slot}, but "
        )
        if self.outcome != ABORTED:
            return text + _reason(self.outcome, self.peer, timeout_seconds)
        return text + describe_abort(self.abort, timeout_seconds)


def describe_abort(word: int, timeout_seconds: float) -> str:
    """Which rank ended the exchanges, and why, in words.

    Args:
        word: a rank's abort word: `abort_word` in words.h.
        timeout_seconds: how long was waited.
    """
    outcome, reporter, culprit = word >> 48, word >> 24 & 0xFFFFFF, word & 0xFFFFFF
    reason = _reason(outcome, culprit, timeout_seconds)
    return f"rank {reporter} ended the exchange: {reason}"


def _reason(outcome: int, culprit: int, timeout_seconds: float) -> str:
    return {
        TIMED_OUT: f"rank {culprit} did nothing for {timeout_seconds:g} s",
        DIED: f"the process of rank {culprit} has ended",
        LEFT: f"rank {culprit} has closed its transport",
    }[outcome]
