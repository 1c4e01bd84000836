"""Slots, arenas and failures, for transports that run `protocol/exchange.h`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distca.transport.base import DIRECTIONS, Channel, ChannelBytes

SLOTS = 16
"""Slots of a direction: exchanges that may be under way together. A slot costs two cache lines of
control memory for each rank."""
CHANNELS = len(DIRECTIONS) * SLOTS

ARENA_ALIGNMENT = 4096
"""Multiple at which arenas begin, in bytes: a page of a CPU."""

# `Outcome` in words.h.
DONE, NOT_YET, TIMED_OUT, DIED, LEFT, ABORTED = range(6)


def _channel_of(number: int) -> Channel:
    return Channel(DIRECTIONS[number % len(DIRECTIONS)], number // len(DIRECTIONS))


def arena_offsets(sizes: Mapping[Channel, ChannelBytes]) -> tuple[dict[Channel, int], int]:
    """Returns the offset of each channel's arena, the same in every rank's memory, and their total
    bytes."""
    begins, end = {}, 0
    for channel, room in sizes.items():
        assert channel.slot < SLOTS, f"slot {channel.slot} has no flags in the control memory"
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
        """Describes what went wrong.

        Args:
            rank: the rank that failed.
            timeout_seconds: time limit of a wait.
        """
        channel = _channel_of(self.channel)
        waited = "room at" if self.sending else "the message of"
        text = (
            f"rank {rank} waited for {waited} rank {self.peer} in exchange {self.epoch} of "
            f"channel '{channel.direction}' {channel.slot}, but "
        )
        if self.outcome != ABORTED:
            return text + _reason(self.outcome, self.peer, timeout_seconds)
        return text + describe_abort(self.abort, timeout_seconds)


def describe_abort(word: int, timeout_seconds: float) -> str:
    """Describes which rank ended the exchanges, and why.

    Args:
        word: a rank's abort word: `abort_word` in words.h.
        timeout_seconds: time limit of a wait.
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
