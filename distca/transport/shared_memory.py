"""The transport between processes of one machine, over memory that they share.

It runs the protocol of the GPU transport (`protocol/exchange.h`) on CPUs: puts into the receiver's
arena, arrival flags by source, credits by destination. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from distca.transport.agreement import on_all_ranks
from distca.transport.base import (
    WAYS,
    Channel,
    ChannelBytes,
    MessageSizes,
    Pending,
    Transport,
    TransportError,
    first_bytes,
)
from distca.transport.compiled import host_library
from distca.transport.segments import SymmetricMemory, machine_id

SLOTS = 2
CHANNELS = len(WAYS) * SLOTS
# Python looks for signals, such as Ctrl-C, this often while it waits.
_SLICE_SECONDS = 0.2
# `Outcome` in words.h.
_DONE, _NOT_YET, _TIMED_OUT, _DIED, _LEFT, _ABORTED = range(6)


class _Failure(ctypes.Structure):
    """`Failure` in shared_memory.cpp."""

    _fields_ = [
        ("outcome", ctypes.c_int),
        ("peer", ctypes.c_int),
        ("sending", ctypes.c_int),
        ("channel", ctypes.c_int),
        ("epoch", ctypes.c_uint64),
        ("abort", ctypes.c_uint64),
    ]


def channel_number(channel: Channel) -> int:
    """Which of the control page's channels it is."""
    assert 0 <= channel.slot < SLOTS
    return channel.slot * len(WAYS) + WAYS.index(channel.way)


def channel_of(number: int) -> Channel:
    """The inverse of `channel_number`."""
    return Channel(WAYS[number % len(WAYS)], number // len(WAYS))


def arena_offsets(sizes: Mapping[Channel, ChannelBytes]) -> tuple[dict[Channel, int], int]:
    """Where each channel's arena begins in every rank's memory, and the size of all, in bytes."""
    begins, end = {}, 0
    for channel, room in sizes.items():
        begins[channel] = end
        end += -(-room.receive // mmap.PAGESIZE) * mmap.PAGESIZE
    return begins, end


class SharedMemoryTransport(Transport):
    """Puts into the memory of other processes; a thread for each channel does the sending.

    Args:
        group: the ranks that exchange, all on one machine. Used to set up, in `reserve` also.
        timeout: how long a rank waits for one that is alive. A process that has ended is noticed
            within a fraction of a second.
        library: a build of the native code; None: it is compiled at first use.

    Raises:
        ValueError: the ranks are not all on one machine.
        TransportError: the native code cannot be compiled, or memory cannot be shared. Every rank
            raises the same.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta = timedelta(minutes=10),
        library: Path | None = None,
    ) -> None:
        super().__init__(group.rank(), group.size())
        if len(set(on_all_ranks(group, machine_id))) > 1:
            raise ValueError(
                "the ranks are on several machines, which share no memory: give "
                "--distca-transport collective"
            )
        self._group, self._timeout = group, timeout.total_seconds()
        self._native: ctypes.CDLL
        # All load it or none: an error here is everybody's.
        on_all_ranks(group, lambda: self._load(library or host_library()))
        control_bytes = self._native.distca_control_bytes(self.world_size, CHANNELS)
        self._controls = SymmetricMemory(group, control_bytes, held=True)
        self._handle = self._native.distca_open(
            self.rank,
            self.world_size,
            CHANNELS,
            _addresses(self._controls.parts),
            (ctypes.c_int * self.world_size)(*self._controls.files),
            self._timeout,
        )
        # Threads of the native code end before what they use goes, also when nobody calls `close`.
        self._end = weakref.finalize(
            self, _end, self._native, self._handle, self._controls, os.getpid()
        )
        self._epochs = [0] * CHANNELS
        self._staging: dict[Channel, torch.Tensor] = {}
        self._arenas: dict[Channel, torch.Tensor] = {}

    def _load(self, library: Path) -> None:
        """The native code; its calls let other Python threads run."""
        self._native = ctypes.CDLL(str(library))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._native, name)
            function.restype = None if result is None else _TYPES[result]
            function.argtypes = [_TYPES[argument] for argument in arguments]

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`.

        Raises:
            TransportError: there is not enough memory; every rank raises the same.
        """
        self._staging.clear()
        self._arenas.clear()
        begins, end = arena_offsets(sizes)
        memory = SymmetricMemory(self._group, end)
        for channel, room in sizes.items():
            begin = begins[channel]
            parts = [part[begin : begin + room.receive] for part in memory.parts]
            self._arenas[channel] = parts[self.rank]
            self._staging[channel] = torch.empty(room.send, dtype=torch.uint8)
            number = channel_number(channel)
            self._native.distca_set_arenas(self._handle, number, _addresses(memory.parts, begin))
        # The memory that was there before goes here: nothing is under way in it.
        self._memory = memory

    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """See `Transport.staging`."""
        return first_bytes(self._staging[channel], nbytes)

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        received = first_bytes(self._arenas[channel], sum(sizes.receive))
        staging = first_bytes(self._staging[channel], sum(sizes.send))
        words = ctypes.c_uint64 * self.world_size
        number = channel_number(channel)
        self._epochs[number] += 1
        self._check(
            self._native.distca_start(
                self._handle,
                number,
                self._epochs[number],
                staging.data_ptr(),
                words(*sizes.send),
                words(*sizes.put_at),
            )
        )
        return _Receiving(self, number, self._epochs[number], received)

    def wait_for(self, number: int, epoch: int) -> None:
        """Until an exchange of a channel is complete.

        Raises:
            TransportError: a rank has ended, closed its transport, or does nothing.
        """
        deadline = time.monotonic() + self._timeout
        outcome = _NOT_YET
        while outcome == _NOT_YET:
            left = deadline - time.monotonic()
            last = left < _SLICE_SECONDS
            slice_seconds = max(0.0, min(left, _SLICE_SECONDS))
            outcome = self._native.distca_wait(self._handle, number, epoch, slice_seconds, last)
        self._check(outcome)

    def release(self, number: int, epoch: int) -> None:
        """What an exchange of a channel brought was read."""
        self._native.distca_release(self._handle, number, epoch)

    def _check(self, outcome: int) -> None:
        if outcome == _DONE:
            return
        failure = _Failure()
        self._native.distca_failure(self._handle, ctypes.byref(failure))
        raise TransportError(describe_failure(self.rank, failure, self._timeout))

    def close(self) -> None:
        """See `Transport.close`. Ranks that still wait for this one leave with an error."""
        self._staging.clear()
        self._arenas.clear()
        self._end()


class _Receiving(Pending):
    def __init__(
        self, transport: SharedMemoryTransport, number: int, epoch: int, received: torch.Tensor
    ) -> None:
        self._transport, self._received = transport, received
        self._number, self._epoch = number, epoch

    def wait(self) -> torch.Tensor:
        self._transport.wait_for(self._number, self._epoch)
        return self._received

    def release(self) -> None:
        self._transport.release(self._number, self._epoch)


def describe_failure(rank: int, failure: Any, timeout_seconds: float) -> str:
    """What went wrong, in words.

    Args:
        rank: whom it is told.
        failure: has the fields of `Failure` in shared_memory.cpp.
        timeout_seconds: how long was waited.
    """

    def reason(outcome: int, culprit: int) -> str:
        return {
            _TIMED_OUT: f"rank {culprit} did nothing for {timeout_seconds:g} s",
            _DIED: f"the process of rank {culprit} has ended",
            _LEFT: f"rank {culprit} has closed its transport",
        }[outcome]

    channel = channel_of(failure.channel)
    waited = "room at" if failure.sending else "the message of"
    text = (
        f"rank {rank} waited for {waited} rank {failure.peer} in exchange {failure.epoch} of "
        f"channel '{channel.way}' {channel.slot}, but "
    )
    if failure.outcome != _ABORTED:
        return text + reason(failure.outcome, failure.peer)
    outcome, reporter, culprit = (
        failure.abort >> 48,
        failure.abort >> 24 & 0xFFFFFF,
        failure.abort & 0xFFFFFF,
    )
    return text + f"rank {reporter} ended the exchange: {reason(outcome, culprit)}"


def _addresses(parts: list[torch.Tensor], offset: int = 0) -> Any:
    return (ctypes.c_void_p * len(parts))(*(part.data_ptr() + offset for part in parts))


def _end(native: ctypes.CDLL, handle: int, controls: SymmetricMemory, process: int) -> None:
    # A process that was forked off this one has the memory, but not the threads.
    if os.getpid() == process:
        native.distca_close(handle)
        controls.close()


_Argument = Literal["int", "word", "seconds", "pointer"]
_TYPES: dict[_Argument, Any] = {
    "int": ctypes.c_int,
    "word": ctypes.c_uint64,
    "seconds": ctypes.c_double,
    "pointer": ctypes.c_void_p,
}
_FUNCTIONS: dict[str, tuple[_Argument | None, list[_Argument]]] = {
    "distca_control_bytes": ("word", ["int", "int"]),
    "distca_open": ("pointer", ["int", "int", "int", "pointer", "pointer", "seconds"]),
    "distca_set_arenas": (None, ["pointer", "int", "pointer"]),
    "distca_start": ("int", ["pointer", "int", "word", "pointer", "pointer", "pointer"]),
    "distca_wait": ("int", ["pointer", "int", "word", "seconds", "int"]),
    "distca_release": (None, ["pointer", "int", "word"]),
    "distca_failure": (None, ["pointer", "pointer"]),
    "distca_close": (None, ["pointer"]),
}
