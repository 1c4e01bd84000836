"""How fast the device transport's kernel copies on one GPU: by threads, and by the tensor memory
accelerator (Hopper and later), against a plain device copy.

    CUDA_MODULE_LOADING=EAGER python benchmarks/kernels/device_copy.py

Two ranks of one process put into each other's memory on the same GPU, so links play no part: this
shows whether a few thread blocks copy fast enough for one, not what a link gives. The GPU is held
back until all is launched, so that launching is not measured. Not run on hardware yet.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # virtual ranks are shared with tests

from benchmarks.arguments import Parser
from distca.transport.device import BLOCKS
from support.exchanges import CHANNELS, sizes_of
from support.virtual_ranks import VirtualRanks


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The median time of some work on the current stream, without the time that launching takes.

    Raises:
        RuntimeError: the work cannot be launched ahead.
    """
    times: list[float] = []
    held_cycles = 4_000_000
    while len(times) < rounds + 2:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(held_cycles)
        begin.record()
        work()
        end.record()
        ahead = not begin.query()
        end.synchronize()
        if ahead:
            times.append(begin.elapsed_time(end) / 1e3)
            continue
        held_cycles *= 2
        if held_cycles > 1 << 32:
            raise RuntimeError("the GPU is waited for while work is launched")
    return statistics.median(times[2:])


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, BLOCKS])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("needs a GPU\n")
        return 1
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    ways = ["threads"]
    if torch.cuda.get_device_capability() >= (9, 0):
        ways.append("bulk")
    sys.stdout.write("MB   way      blocks  kernel GB/s   copy GB/s   kernel / copy\n")
    for megabytes, way, blocks in itertools.product(options.megabytes, ways, options.blocks):
        times = measure(megabytes, options.rounds, way == "bulk", blocks)
        kernel, copy = (megabytes / 1e3 / time for time in times)
        sys.stdout.write(
            f"{megabytes:4} {way:8} {blocks:6} {kernel:12.1f} {copy:11.1f} {kernel / copy:15.3f}\n"
        )
    return 0


def measure(megabytes: int, rounds: int, bulk: bool, blocks: int) -> tuple[float, float]:
    """Seconds of one message: sent, waited for and released by the kernels; and plainly copied."""
    nbytes = megabytes * 1_000_000
    virtual, channel = VirtualRanks(2, nbytes, bulk=bulk, blocks=blocks), CHANNELS[0]
    number, stream = channel.number, torch.cuda.current_stream()
    matrix = np.array([[0, nbytes], [0, 0]])
    of_ranks = [sizes_of(matrix, rank) for rank in (0, 1)]
    source, target = (virtual.staging[rank][channel][:nbytes] for rank in (0, 1))
    empty = torch.empty(0, dtype=torch.uint8, device=virtual.device)
    epochs = itertools.count(1)

    def put() -> None:
        epoch = next(epochs)
        for rank, sizes in enumerate(of_ranks):
            virtual.endpoints[rank].send(number, epoch, source, sizes.words, 0, stream)
        for endpoint in virtual.endpoints:
            endpoint.wait(number, epoch, empty, stream)
            endpoint.release(number, epoch, stream)

    return seconds(put, rounds), seconds(lambda: target.copy_(source), rounds)


if __name__ == "__main__":
    sys.exit(main())
