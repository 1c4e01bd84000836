"""The transport between processes of one machine, over shared memory. Linux only.

The protocol is that of the GPU transport (`protocol/exchange.h`), run on CPUs: puts into the
receiver's arena, arrival flags by source, credits by destination.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Literal

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
)
from distca.transport.compiled import host_library
from distca.transport.shared_segments import SymmetricMemory, machine_id

_Words = ctypes.Array[ctypes.c_uint64]

# A wait returns to Python at this interval, to handle signals such as Ctrl-C.
_SLICE_SECONDS = 0.2


class SharedMemoryTransport(Transport):
    """Puts into the memory of other processes, by a sending thread for each channel.

    Args:
        group: ranks that exchange, all on one machine; used to set up, and in `reserve`.
        timeout: time limit of a wait for a rank that is alive. A process that has ended is noticed
            within a fraction of a second.
        library: path of the native code; None: compiled at first use.
        members_only: whether a rank that neither sends nor receives in an exchange takes no part.
            It need not start it; `reserve` stays collective.

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
        members_only: bool = False,
    ) -> None:
        super().__init__(group.rank(), group.size())
        self._members_only = members_only
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
        # Of each channel: its exchanges, and the epochs of the last messages to and from each rank.
        self._exchanges = [0] * CHANNELS
        self._epochs = [([1] * self.world_size, [1] * self.world_size) for _ in range(CHANNELS)]
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
            number = channel.number
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
        number = channel.number
        self._exchanges[number] += 1
        to, of = self._next_epochs(number, sizes)
        if self._members_only:
            # What arrived before was read, so the arena is free.
            self._grant(number, self._words(max(epoch - 1, 0) for epoch in of))
        self._check(
            self._native.distca_start(
                self._handle,
                number,
                self._exchanges[number],
                to,
                staging.data_ptr(),
                send.data_ptr(),
                put_at.data_ptr(),
            )
        )
        return _Receiving(self, number, self._exchanges[number], of, received)

    def _next_epochs(self, number: int, sizes: MessageSizes) -> tuple[_Words, _Words]:
        """Epochs of an exchange's messages to each rank, and from each; 0: there is none."""
        if not self._members_only:
            epochs = self._words([self._exchanges[number]] * self.world_size)
            return epochs, epochs
        found = self._words(), self._words()
        for last, epochs, messages in zip(
            self._epochs[number], found, (sizes.outgoing, sizes.incoming), strict=True
        ):
            for message in messages:
                last[message.rank] += 1
                epochs[message.rank] = last[message.rank]
        return found

    def _words(self, values: Iterable[int] = ()) -> _Words:
        return (ctypes.c_uint64 * self.world_size)(*values)

    def wait_for(self, number: int, exchange: int, epochs: _Words) -> None:
        """Waits until an exchange of a channel is complete.

        Args:
            number: channel number.
            exchange: number of the exchange on this rank.
            epochs: epoch of each rank's message; 0: there is none.

        Raises:
            TransportError: a rank has ended, closed its transport, or does nothing.
        """
        deadline = time.monotonic() + self._timeout
        outcome = NOT_YET
        while outcome == NOT_YET:
            left = deadline - time.monotonic()
            last = left < _SLICE_SECONDS
            seconds = max(0.0, min(left, _SLICE_SECONDS))
            outcome = self._native.distca_wait(
                self._handle, number, exchange, epochs, seconds, last
            )
        self._check(outcome)

    def release(self, number: int, epochs: _Words) -> None:
        """Notes that the messages of these epochs were read: ranks may send the next."""
        if not self._members_only:
            self._grant(number, epochs)

    def _grant(self, number: int, epochs: _Words) -> None:
        """Tells ranks that there is room for what follows their messages of these epochs."""
        self._native.distca_release(self._handle, number, epochs)

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
        self,
        transport: SharedMemoryTransport,
        number: int,
        exchange: int,
        epochs: _Words,
        received: torch.Tensor,
    ) -> None:
        self._transport, self._received = transport, received
        self._number, self._exchange, self._epochs = number, exchange, epochs

    def wait(self) -> torch.Tensor:
        self._transport.wait_for(self._number, self._exchange, self._epochs)
        return self._received

    def release(self) -> None:
        self._transport.release(self._number, self._epochs)


def _addresses(parts: list[torch.Tensor], offset: int = 0) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(parts))(*(part.data_ptr() + offset for part in parts))


def _end(native: ctypes.CDLL, handle: int, controls: SymmetricMemory, process: int) -> None:
    # A forked child has inherited the memory, but not the threads.
    if os.getpid() == process:
        native.distca_close(handle)
        controls.close()


_Argument = Literal["int", "word", "seconds", "pointer"]
_TYPES: dict[
    _Argument, type[ctypes.c_int | ctypes.c_uint64 | ctypes.c_double | ctypes.c_void_p]
] = {
    "int": ctypes.c_int,
    "word": ctypes.c_uint64,
    "seconds": ctypes.c_double,
    "pointer": ctypes.c_void_p,
}
_FUNCTIONS: dict[str, tuple[_Argument | None, list[_Argument]]] = {
    "distca_control_bytes": ("word", ["int", "int"]),
    "distca_open": ("pointer", ["int", "int", "int", "pointer", "pointer", "seconds"]),
    "distca_set_arenas": (None, ["pointer", "int", "pointer"]),
    "distca_start": ("int", ["pointer", "int", "word", "pointer", "pointer", "pointer", "pointer"]),
    "distca_wait": ("int", ["pointer", "int", "word", "pointer", "seconds", "int"]),
    "distca_release": (None, ["pointer", "int", "pointer"]),
    "distca_failure": (None, ["pointer", "pointer"]),
    "distca_close": (None, ["pointer"]),
}
