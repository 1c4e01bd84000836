"""The kernels of the device transport, and one rank's state on its GPU.

Ranks may be processes with a GPU each, or several in one process: a rank needs only the addresses
of the others' memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distca.transport.channels import CHANNELS, Failure

if TYPE_CHECKING:
    from cuda.core import Kernel

THREADS = 512
BLOCKS = 8
"""Thread blocks that send on one channel, and so the SMs that an exchange takes at most. Every
block copies an equal part of each message."""


class _Rank(NamedTuple):
    """Arguments that all of a rank's kernels share: `Rank` in device.cuh."""

    rank: int
    ranks: int
    control: int
    arenas: int
    controls: int
    arenas_of: int
    complete: int
    failed: int
    failure: int
    timeout_ns: int


def control_bytes(ranks: int) -> int:
    """Returns the bytes of a rank's control memory: `Flags` in words.h."""
    line, head_lines = 64, 4
    return line * (head_lines + 2 * ranks * CHANNELS)


class Kernels:
    """The kernels of a cubin, on the current device.

    Args:
        cubin: path of the code, compiled from `protocol/device.cu`.
    """

    def __init__(self, cubin: Path) -> None:
        from cuda.core import ObjectCode

        self.code = ObjectCode.from_cubin(cubin.read_bytes())
        self._kernels: dict[str, Kernel] = {}

    def launch(self, name: str, blocks: int, stream: torch.cuda.Stream, *arguments: object) -> None:
        """Launches a kernel. Arguments are addresses as int, or ctypes values."""
        from cuda.core import LaunchConfig, Stream, launch

        if name not in self._kernels:
            self._kernels[name] = self.code.get_kernel(f"distca_{name}")
        config = LaunchConfig(grid=blocks, block=THREADS)
        on = Stream.from_handle(stream.cuda_stream)
        launch(on, config, self._kernels[name], *arguments)


class DeviceRank:
    """One rank's end of the protocol: its state on the GPU, and launches of its kernels.

    Args:
        kernels: kernels, loaded on this rank's device.
        rank: number of this rank.
        controls: address of each rank's control memory, zeroed, as mapped here; 0: not mapped.
        device: this rank's GPU.
        timeout_seconds: time limit of a kernel's wait for another rank.
        bulk: copy to mapped ranks by the tensor memory accelerator, on GPUs that have one (from
            compute capability 9.0); else by threads.
        blocks: thread blocks that send.
    """

    def __init__(
        self,
        kernels: Kernels,
        rank: int,
        controls: Sequence[int],
        device: torch.device,
        timeout_seconds: float,
        bulk: bool = True,
        blocks: int = BLOCKS,
    ) -> None:
        self.rank, self.ranks = rank, len(controls)
        self._kernels, self._device, self._timeout = kernels, device, timeout_seconds
        self._bulk, self._blocks = bulk, blocks
        self._controls, self._own_control = self._table(controls), controls[rank]
        self._mapped = [peer for peer, address in enumerate(controls) if address]
        self._complete = torch.zeros(CHANNELS * self.ranks, dtype=torch.int32, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=device)
        # Pinned: kernels write it, and the CPU reads it without waiting for the GPU.
        self._failure = torch.zeros(len(Failure._fields), dtype=torch.int64).pin_memory()
        self._state = torch.empty(0)
        # Of each channel: sizes and places of messages, by the tensor on the CPU.
        self._tables = [WeakIdKeyDictionary() for _ in range(CHANNELS)]

    def _table(self, words: Sequence[int]) -> torch.Tensor:
        return torch.tensor(words, dtype=torch.int64, device=self._device)

    def set_arenas(self, arenas: Sequence[int]) -> None:
        """Sets the address of each rank's receive arenas, as mapped here; 0: not mapped.

        Raises:
            RuntimeError: a rank's control memory is mapped and its arenas are not, or vice versa:
                the rank would receive notice of messages that were never put.
        """
        if [peer for peer, address in enumerate(arenas) if address] != self._mapped:
            raise RuntimeError(
                f"rank {self.rank} maps the control memory of ranks {self._mapped}, but the arenas "
                f"at {list(map(hex, arenas))}: choose another transport"
            )
        for tables in self._tables:
            tables.clear()
        self._arenas = self._table(arenas)
        self._state = self._table(
            _Rank(
                rank=self.rank,
                ranks=self.ranks,
                control=self._own_control,
                arenas=arenas[self.rank],
                controls=self._controls.data_ptr(),
                arenas_of=self._arenas.data_ptr(),
                complete=self._complete.data_ptr(),
                failed=self._failed.data_ptr(),
                failure=self._failure.data_ptr(),
                timeout_ns=int(self._timeout * 1e9),
            )
        )

    def _launch(
        self,
        name: str,
        blocks: int,
        stream: torch.cuda.Stream,
        number: int,
        epoch: int,
        *more: object,
    ) -> None:
        self._kernels.launch(
            name,
            blocks,
            stream,
            self._state.data_ptr(),
            ctypes.c_int(number),
            ctypes.c_uint64(epoch),
            *more,
        )

    def send(
        self,
        number: int,
        epoch: int,
        staging: torch.Tensor,
        words: torch.Tensor,
        begin: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Puts the messages to rank 0, 1, ... into the receivers' arenas.

        Args:
            number: channel number.
            epoch: number of the channel's exchange, from 1.
            staging: the messages, concatenated: uint8.
            words: sizes and places of the messages, as in `MessageSizes.words`. They are copied to
                the GPU once for all exchanges that are given the same tensor.
            begin: offset of the channel's arena in each receiver's arenas.
            stream: stream of the channel.
        """
        with torch.cuda.stream(stream):
            tables = self._tables[number]
            if words not in tables:
                offsets = torch.tensor([[0], [0], [begin]])
                # torch keeps the pinned memory until the copy is done.
                table = (words + offsets).pin_memory()
                tables[words] = table.to(self._device, non_blocking=True)
            on_device = tables[words]
            self._launch(
                "send",
                self._blocks,
                stream,
                number,
                epoch,
                staging.data_ptr(),
                on_device.data_ptr(),
                ctypes.c_int(self._bulk),
            )

    def wait(
        self, number: int, epoch: int, received: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """Lets the stream wait for all messages.

        If they don't come, every bit of `received` is set: not-a-number in every floating type.
        """
        more = (received.data_ptr(), ctypes.c_uint64(received.numel()))
        self._launch("wait", 1, stream, number, epoch, *more)

    def release(self, number: int, epoch: int, stream: torch.cuda.Stream) -> None:
        """Tells all sources that their messages were read."""
        self._launch("release", 1, stream, number, epoch)

    def wait_for_room(self, number: int, epoch: int, stream: torch.cuda.Stream) -> None:
        """Lets the stream wait until all receivers have released the exchange before."""
        self._launch("wait_for_room", 1, stream, number, epoch)

    def set_ready(self, number: int, epoch: int, stream: torch.cuda.Stream) -> None:
        """Tells all receivers that the stream's puts so far are complete."""
        self._launch("set_ready", 1, stream, number, epoch)

    def gpu_initiated(self) -> bool:
        """Returns whether GPUs start transfers between machines themselves, without a thread of the
        host.

        Waits for the GPU. Only with kernels that NVSHMEM was linked to, and has initialised.
        """
        answer = torch.zeros(1, dtype=torch.int32, device=self._device)
        stream = torch.cuda.current_stream(self._device)
        self._kernels.launch("gpu_initiated", 1, stream, answer.data_ptr())
        return bool(answer.item())

    def failure(self) -> str | None:
        """Returns the failure that a kernel has reported, in words; None: no failure."""
        words = [word % 2**64 for word in self._failure.tolist()]
        found = Failure(*words)
        if found.outcome == 0:
            return None
        return found.describe(self.rank, self._timeout)
