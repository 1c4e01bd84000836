"""Ranks of the device transport in one process on one GPU: memory and streams of their own.

    export CUDA_MODULE_LOADING=EAGER PYTHONPATH=.:tests
    python -m support.virtual_ranks --ranks 4 --exchanges 300
    compute-sanitizer python -m support.virtual_ranks --exchanges 30

They run the same kernels as ranks with a GPU each do where all memory is mapped. Modules are loaded
eagerly, since loading one behind a kernel that waits would never end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from distca.transport import ChannelBytes
from distca.transport.channels import arena_offsets
from distca.transport.compiled_cuda import kernels_of_mapped_peers
from distca.transport.device import BLOCKS, DeviceRank, Kernels, control_bytes
from support.exchanges import CHANNELS, message, sizes_of


class VirtualRanks:
    """So many ranks on the current GPU.

    Args:
        ranks: how many.
        room: the largest message, bytes.
        timeout: seconds that a kernel waits.
        mode: "kernel", or "copy-engine" with torch's copies for NVSHMEM's.
        cubin: the kernels; None: they are compiled.
        bulk: the tensor memory accelerator copies, where there is one; else threads do.
        blocks: thread blocks that send.
    """

    def __init__(
        self,
        ranks: int,
        room: int,
        timeout: float = 20.0,
        mode: str = "kernel",
        cubin: Path | None = None,
        bulk: bool = True,
        blocks: int = BLOCKS,
    ) -> None:
        self.ranks, self.mode = ranks, mode
        self.device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability()
        kernels = Kernels(cubin or kernels_of_mapped_peers(10 * major + minor))
        most = ChannelBytes(ranks * room, ranks * room)
        self.begins, end = arena_offsets(dict.fromkeys(CHANNELS, most))
        self._controls = [self._bytes(control_bytes(ranks)) for _ in range(ranks)]
        self.arenas = [self._bytes(end) for _ in range(ranks)]
        self.staging = [{c: self._bytes(ranks * room) for c in CHANNELS} for _ in range(ranks)]
        controls = [control.data_ptr() for control in self._controls]
        self.endpoints = [
            DeviceRank(kernels, rank, controls, self.device, timeout, bulk, blocks)
            for rank in range(ranks)
        ]
        for endpoint in self.endpoints:
            endpoint.set_arenas([arena.data_ptr() for arena in self.arenas])
        self.streams = [
            {channel: torch.cuda.Stream(self.device) for channel in CHANNELS} for _ in range(ranks)
        ]
        self.epochs = dict.fromkeys(CHANNELS, 0)
        # One of each stream: they add at the same time.
        self._wrong = {
            (rank, channel): torch.zeros((), dtype=torch.int64, device=self.device)
            for rank in range(ranks)
            for channel in CHANNELS
        }
        torch.cuda.synchronize()

    def _bytes(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def start(self, channel, number: int, matrix: np.ndarray, senders=None) -> None:
        """All ranks, or some, send on a channel."""
        self.epochs[channel] += 1
        for rank in range(self.ranks) if senders is None else senders:
            sizes, stream = sizes_of(matrix, rank), self.streams[rank][channel]
            pieces = [message(number, rank, peer, n) for peer, n in enumerate(sizes.send)]
            staging = self.staging[rank][channel][: sum(sizes.send)]
            with torch.cuda.stream(stream):
                staging.copy_(torch.cat(pieces).pin_memory(), non_blocking=True)
            arena = self.begins[channel]
            where = channel.number, self.epochs[channel]
            if self.mode == "kernel":
                self.endpoints[rank].send(*where, staging, sizes.words, arena, stream)
                continue
            self.endpoints[rank].wait_for_room(*where, stream)
            with torch.cuda.stream(stream):
                for peer, begin, end in sizes.outgoing:
                    to = self.arenas[peer][arena + sizes.put_at[peer] :][: end - begin]
                    to.copy_(staging[begin:end], non_blocking=True)
            self.endpoints[rank].set_ready(*where, stream)

    def finish(self, channel, number: int, matrix: np.ndarray) -> None:
        """All ranks wait for what is sent on a channel, compare it, and release it."""
        for rank in range(self.ranks):
            sizes, stream = sizes_of(matrix, rank), self.streams[rank][channel]
            begin = self.begins[channel]
            received = self.arenas[rank][begin : begin + sum(sizes.receive)]
            where = channel.number, self.epochs[channel]
            self.endpoints[rank].wait(*where, received, stream)
            pieces = [message(number, peer, rank, n) for peer, n in enumerate(sizes.receive)]
            with torch.cuda.stream(stream):
                expected = torch.cat(pieces).pin_memory().to(self.device, non_blocking=True)
                self._wrong[rank, channel] += (received != expected).sum()
                received.fill_(0xEE)
            self.endpoints[rank].release(*where, stream)

    def wrong(self) -> int:
        """How many bytes were not as they were sent."""
        torch.cuda.synchronize()
        return sum(int(wrong) for wrong in self._wrong.values())

    def failures(self) -> list[str | None]:
        """What each rank's kernels report."""
        torch.cuda.synchronize()
        return [endpoint.failure() for endpoint in self.endpoints]


def run(virtual: VirtualRanks, exchanges: int, sizes: Sequence[int], room: int) -> int:
    """Messages in ping-pong order; returns how many bytes were wrong.

    Args:
        virtual: the ranks.
        exchanges: how many.
        sizes: sizes of all messages of an exchange, taken in turn; none: ragged and empty messages.
        room: the largest message, bytes.

    Raises:
        RuntimeError: a kernel reports a failure.
    """
    ranks, rng = virtual.ranks, np.random.default_rng(0)
    under_way: dict = {}
    for number in range(exchanges):
        channel = CHANNELS[int(rng.integers(len(CHANNELS)))]
        if channel in under_way:
            virtual.finish(channel, *under_way.pop(channel))
        if sizes:
            matrix = np.full((ranks, ranks), sizes[number % len(sizes)])
        else:
            matrix = rng.integers(0, room + 1, (ranks, ranks))
            # Multiples of 16, of 4, and any: the ways of copying.
            unit = int(rng.choice([1, 4, 16]))
            matrix = matrix // unit * unit
            matrix[rng.random((ranks, ranks)) < 0.3] = 0
        np.fill_diagonal(matrix, 0)
        virtual.start(channel, number, matrix)
        under_way[channel] = number, matrix
        if number % 8 == 0:
            torch.cuda.synchronize()
    for channel, started in under_way.items():
        virtual.finish(channel, *started)
    for failure in virtual.failures():
        if failure is not None:
            raise RuntimeError(failure)
    return virtual.wrong()


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the device transport's kernels on one GPU.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--exchanges", type=int, default=300)
    parser.add_argument("--room", type=int, default=200_000, help="Bytes of a message at most.")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[],
        help="All messages of an exchange have one of these sizes, in turn. Default: any.",
    )
    parser.add_argument("--mode", choices=("kernel", "copy-engine"), default="kernel")
    parser.add_argument(
        "--bulk",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="By the tensor memory accelerator, where there is one; else by threads.",
    )
    parser.add_argument("--cubin", type=Path, default=None, help="Compiled before.")
    options = parser.parse_args()
    room = max([options.room, *options.sizes])
    virtual = VirtualRanks(
        options.ranks, room, mode=options.mode, cubin=options.cubin, bulk=options.bulk
    )
    wrong = run(virtual, options.exchanges, options.sizes, room)
    sys.stdout.write(
        f"{options.exchanges} exchanges of {options.ranks} ranks: {wrong} bytes wrong\n"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
