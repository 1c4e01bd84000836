"""Shared memory against gloo: the same ragged exchanges by both, in turn, in the same processes.

    python benchmarks/links/transports.py --processes 2 4 --output DIR

Each exchange is started, waited for, and released, with the staging filled beforehand, so that only
moving bytes is measured. "Ragged" messages have 0 to 2 times the size, the same for both.
The ratio is gloo's time over that of shared memory. With `--output` the figures are written as
`transports.md` and `transports.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from distca.machine import cpu_name
from distca.progress import progress
from distca.transport import (
    Channel,
    ChannelBytes,
    CollectiveTransport,
    MessageSizes,
    Transport,
)
from distca.transport.shared_memory import SharedMemoryTransport

CHANNELS = [Channel("dispatch", slot) for slot in (0, 1)]
WAYS_TO_RUN = ("one after the other", "ping-pong")


def as_sizes(matrix: np.ndarray, rank: int) -> MessageSizes:
    before = np.cumsum(matrix, axis=0) - matrix
    columns = (matrix[rank], matrix[:, rank], before[rank])
    return MessageSizes(*(tuple(column.tolist()) for column in columns))


def matrices(ranks: int, nbytes: int, ragged: bool, count: int) -> list[np.ndarray]:
    """Bytes from each rank to each, `[ranks, ranks]`, the same on all ranks."""
    rng = np.random.default_rng(nbytes)
    found = []
    for _ in range(count):
        matrix = np.full((ranks, ranks), nbytes)
        if ragged:
            matrix = rng.integers(0, 2 * nbytes + 1, (ranks, ranks))
        np.fill_diagonal(matrix, 0)
        found.append(matrix)
    return found


def one_after_the_other(transport: Transport, sizes: list[MessageSizes]) -> None:
    for each in sizes:
        pending = transport.start("measured", CHANNELS[0], each)
        pending.wait()
        pending.release()


def ping_pong(transport: Transport, sizes: list[MessageSizes]) -> None:
    """Runs exchanges, each started before the one before is waited for."""
    before = None
    for number, each in enumerate(sizes):
        pending = transport.start("measured", CHANNELS[number % 2], each)
        if before is not None:
            before.wait()
            before.release()
        before = pending
    if before is not None:
        before.wait()
        before.release()


def work(rank: int, ranks: int, store: str, options: argparse.Namespace) -> None:
    """Runs one process; rank 0 prints a line of JSON for each measurement."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    transports: dict[str, Transport] = {
        "shm": SharedMemoryTransport(dist.group.WORLD),
        "gloo": CollectiveTransport(dist.group.WORLD, torch.device("cpu")),
    }
    runs: dict[str, Callable[[Transport, list[MessageSizes]], None]] = dict(
        zip(WAYS_TO_RUN, (one_after_the_other, ping_pong), strict=True)
    )
    for nbytes in options.bytes:
        room = ChannelBytes(2 * ranks * nbytes, 2 * ranks * nbytes)
        for transport in transports.values():
            transport.reserve(dict.fromkeys(CHANNELS, room))
            for channel in CHANNELS:
                transport.staging(channel, room.send).fill_(rank)
        for ragged in (False, True):
            drawn = matrices(ranks, nbytes, ragged, options.exchanges)
            sizes = [as_sizes(matrix, rank) for matrix in drawn]
            for way, run in runs.items():
                times: dict[str, list[float]] = {name: [] for name in transports}
                for number in range(options.rounds + 1):
                    for name, transport in transports.items():
                        dist.barrier()
                        started = time.perf_counter()
                        run(transport, sizes)
                        dist.barrier()
                        # The first round warms up.
                        if number:
                            times[name].append((time.perf_counter() - started) / len(sizes))
                if rank == 0:
                    line = {
                        "ranks": ranks,
                        "bytes": nbytes,
                        "messages": "ragged" if ragged else "even",
                        "order": way,
                        **{name: statistics.median(each) for name, each in times.items()},
                        "ratio": statistics.median(
                            gloo / shm
                            for shm, gloo in zip(times["shm"], times["gloo"], strict=True)
                        ),
                    }
                    sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()
    for transport in transports.values():
        transport.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, options: argparse.Namespace) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--of", str(ranks)]
        command += ["--store", f"{folder}/store", "--rank"]
        processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdout=subprocess.PIPE if rank == 0 else None,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(ranks)
        ]
        assert processes[0].stdout is not None
        total = 2 * len(WAYS_TO_RUN) * len(options.bytes)
        found = []
        with progress("transports", "ways", total, doing=f"{ranks} processes") as shown:
            for line in processes[0].stdout:
                found.append(json.loads(line))
                shown.update()
        if any(process.wait() for process in processes):
            raise RuntimeError("a process failed")
    return found


def main() -> int:
    parser = Parser(__doc__, {"rank": 0, "processes": 2})
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--bytes",
        type=int,
        nargs="+",
        default=[1_000, 30_000, 300_000, 3_000_000],
        help="Of each message.",
    )
    parser.add_argument("--exchanges", type=int, default=20, help="In a measurement.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, metavar="DIR", help="Write the figures there.")
    for flag in ("--rank", "--of"):
        parser.add_argument(flag, type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--store", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank, options.of, options.store, options)
        return 0
    found = [line for ranks in options.processes for line in measure(ranks, options)]
    text = report(found, options)
    if options.output is not None:
        pages.save(options.output, "transports", text, __file__, found)
    else:
        print(text)
    return 0


def report(found: list[dict], options: argparse.Namespace) -> str:
    """Formats the figures as a Markdown table."""
    head = ["processes", "bytes of a message", "messages", "order", "gloo, ms", "shm, ms"]
    rows = [
        [
            *(line["ranks"], f"{line['bytes']:,}", line["messages"], line["order"]),
            *(f"{1e3 * line['gloo']:.3f}", f"{1e3 * line['shm']:.3f}", f"{line['ratio']:.2f}"),
        ]
        for line in found
    ]
    lines = [
        "# Shared memory against gloo",
        "",
        f"    {pages.typed('benchmarks/links/transports.py')}",
        "",
        f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch "
        f"{torch.__version__}; medians of {options.rounds} rounds",
        "",
        pages.table([*head, "gloo / shm"], rows),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
