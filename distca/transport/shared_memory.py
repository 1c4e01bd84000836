"""The transport between processes of one machine, over shared memory. Linux only.

The protocol is that of the GPU transport (`protocol/exchange.h`), run on CPUs: puts into the
receiver's arena, arrival flags by source, credits by destination.
"""

from __future__ import annotations

import ctypes
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
    Channel,
    ChannelBytes,
    MessageSizes,
    Pending,
    Transport,
    TransportError,
    first_bytes,
)
from distca.transport.channels import (
    CHANNELS,
    DONE,
    NOT_YET,
    Failure,
    arena_offsets,
    channel_number,
)
from distca.transport.compiled import host_library
from distca.transport.shared_segments import SymmetricMemory, machine_id

# A wait returns to Python at this interval, to handle signals such as Ctrl-C.
_SLICE_SECONDS = 0.2


class SharedMemoryTransport(Transport):
    """Puts into the memory of other processes, by a sending thread for each channel.

    Args:
        group: ranks that exchange, all on one machine; used to set up, and in `reserve`.
        timeout: time limit of a wait for a rank that is alive. A process that has ended is noticed
            within a fraction of a second.
        library: path of the native code; None: compiled at first use.

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
        # All ranks load it or none: every rank raises an error of any.
        on_all_ranks(group, lambda: self._load(library or host_library()))
        control_bytes = self._native.distca_control_bytes(self.world_size, CHANNELS)
        self._controls = SymmetricMemory(group, control_bytes, held=True)
        handle = self._native.distca_open(
            self.rank,
            self.world_size,
            CHANNELS,
            _addresses(self._controls.parts),
            (ctypes.c_int * self.world_size)(*self._controls.files),
            self._timeout,
        )
        # The native code's threads must end before the memory they use, also without `close`.
        self._end = weakref.finalize(self, _end, self._native, handle, self._controls, os.getpid())
        self._opened: int = handle
        self._epochs = [0] * CHANNELS
        self._staging: dict[Channel, torch.Tensor] = {}
        self._arenas: dict[Channel, torch.Tensor] = {}

    @property
    def _handle(self) -> int:
        """The native endpoint."""
        assert self._end.alive, "the transport is closed"
        return self._opened

    def _load(self, library: Path) -> None:
        """Loads the native code; its calls let other Python threads run."""
        self._native = ctypes.CDLL(str(library))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._native, name)
            function.restype = None if result is None else _TYPES[result]
            function.argtypes = [_TYPES[argument] for argument in arguments]

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`.

        Raises:
            TransportError: memory is short; every rank raises the same.
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
        # This frees the old memory, in which nothing is under way.
        self._memory = memory

    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """See `Transport.staging`."""
        return first_bytes(self._staging[channel], nbytes)

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        received = first_bytes(self._arenas[channel], sizes.received)
        staging = first_bytes(self._staging[channel], sizes.sent)
        send, _, put_at = sizes.words
        number = channel_number(channel)
        self._epochs[number] += 1
        self._check(
            self._native.distca_start(
                self._handle,
                number,
                self._epochs[number],
                staging.data_ptr(),
                send.data_ptr(),
                put_at.data_ptr(),
            )
        )
        return _Receiving(self, number, self._epochs[number], received)

    def wait_for(self, number: int, epoch: int) -> None:
        """Waits until an exchange of a channel is complete.

        Raises:
            TransportError: a rank has ended, closed its transport, or does nothing.
        """
        deadline = time.monotonic() + self._timeout
        outcome = NOT_YET
        while outcome == NOT_YET:
            left = deadline - time.monotonic()
            last = left < _SLICE_SECONDS
            slice_seconds = max(0.0, min(left, _SLICE_SECONDS))
            outcome = self._native.distca_wait(self._handle, number, epoch, slice_seconds, last)
        self._check(outcome)

    def release(self, number: int, epoch: int) -> None:
        """Releases an exchange of a channel: its messages were read."""
        self._native.distca_release(self._handle, number, epoch)

    def _check(self, outcome: int) -> None:
        if outcome == DONE:
            return
        words = (ctypes.c_uint64 * len(Failure._fields))()
        self._native.distca_failure(self._handle, words)
        raise TransportError(Failure(*words).describe(self.rank, self._timeout))

    def close(self) -> None:
        """See `Transport.close`. Ranks that still wait for this rank raise an error."""
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


def _addresses(parts: list[torch.Tensor], offset: int = 0) -> Any:
    return (ctypes.c_void_p * len(parts))(*(part.data_ptr() + offset for part in parts))


def _end(native: ctypes.CDLL, handle: int, controls: SymmetricMemory, process: int) -> None:
    # A forked child has inherited the memory, but not the threads.
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
