"""Random exchanges over a transport: which bytes arrive is known beforehand."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.transport import DIRECTIONS, Channel, ChannelBytes, MessageSizes, Pending, Transport

CHANNELS = [Channel(direction, slot) for slot in (0, 1) for direction in DIRECTIONS]
_NOISE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8))


def sizes_of(matrix: np.ndarray, rank: int) -> MessageSizes:
    """One rank's view of the bytes from each rank to each, int `[ranks, ranks]`."""
    before = np.cumsum(matrix, axis=0) - matrix
    as_tuple = lambda column: tuple(int(x) for x in column)  # noqa: E731
    return MessageSizes(*map(as_tuple, (matrix[rank], matrix[:, rank], before[rank])))


def message(epoch: int, source: int, destination: int, nbytes: int) -> torch.Tensor:
    """What a source sends in the exchange of this number."""
    begin = (epoch * 7919 + source * 104_729 + destination * 1301) % (len(_NOISE) - nbytes)
    return _NOISE[begin : begin + nbytes]


@dataclass
class Exchanges:
    """Random exchanges, alike on all ranks, in ping-pong order on all channels.

    Attributes:
        transport: what is tested.
        seed: seed of sizes and order.
        largest: bytes of a message.
        read_slowly: sleeps now and then between arrival and reading.
        reserve_often: the buffers are now and then allocated anew.
        before: called with the number of each exchange before it.
        members: ranks of the exchanges, in turn; others don't start them. Empty: always all.
    """

    transport: Transport
    seed: int = 0
    largest: int = 20_000
    read_slowly: bool = False
    reserve_often: bool = True
    before: Callable[[int], None] = lambda number: None
    members: Sequence[Sequence[int]] = ()

    def run(self, exchanges: int) -> int:
        """Does so many exchanges; returns how many bytes were wrong. Collective."""
        ranks, rng = self.transport.world_size, np.random.default_rng(self.seed)
        under_way: dict[Channel, tuple[int, np.ndarray, Pending]] = {}
        wrong, room = 0, 0
        for epoch in range(exchanges):
            self.before(epoch)
            if epoch == 0 or (self.reserve_often and rng.random() < 0.005):
                for channel in list(under_way):
                    wrong += self._finish(under_way.pop(channel))
                room = int(rng.integers(1, self.largest)) if epoch else self.largest
                most = ChannelBytes(ranks * room, ranks * room)
                self.transport.reserve(dict.fromkeys(CHANNELS, most))
            channel = CHANNELS[int(rng.integers(len(CHANNELS)))]
            matrix = rng.integers(0, room + 1, (ranks, ranks))
            matrix[rng.random((ranks, ranks)) < rng.choice([0.0, 0.3, 1.0], p=[0.3, 0.6, 0.1])] = 0
            np.fill_diagonal(matrix, 0)
            ends_one = rng.random() < 0.5
            if self.members:
                members = self.members[epoch % len(self.members)]
                others = np.setdiff1d(np.arange(ranks), members)
                matrix[others], matrix[:, others] = 0, 0
                if self.transport.rank not in members:
                    continue
            if channel in under_way:
                wrong += self._finish(under_way.pop(channel))
            under_way[channel] = epoch, matrix, self._start(channel, epoch, matrix)
            if ends_one:
                wrong += self._finish(under_way.pop(next(iter(under_way))))
        for started in under_way.values():
            wrong += self._finish(started)
        return wrong

    def _start(self, channel: Channel, epoch: int, matrix: np.ndarray) -> Pending:
        rank = self.transport.rank
        sizes = sizes_of(matrix, rank)
        staging = self.transport.staging(channel, sum(sizes.send))
        pieces = [message(epoch, rank, peer, n) for peer, n in enumerate(sizes.send)]
        staging.copy_(torch.cat(pieces))
        return self.transport.start(channel.direction, channel, sizes)

    def _finish(self, started: tuple[int, np.ndarray, Pending]) -> int:
        epoch, matrix, pending = started
        rank = self.transport.rank
        received = pending.wait()
        if self.read_slowly and (epoch + rank) % 7 == 0:
            time.sleep(0.002)
        sizes = sizes_of(matrix, rank)
        expected = [message(epoch, peer, rank, n) for peer, n in enumerate(sizes.receive)]
        wrong = int((received != torch.cat(expected)).sum())
        received.fill_(0xEE)
        pending.release()
        return wrong


class Processes:
    """Processes of a gloo group that each run one function and may be killed.

    They are forked from a server that has imported torch, which is quick.

    Args:
        function: `(pipe, *args)`, of a module; the pipe leads to the test.
        args: picklable.
        world_size: how many.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "distca.transport", "support.exchanges"])
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            mine, its = context.Pipe()
            process = context.Process(
                target=_work, args=(its, function, args, rank, world_size, store), daemon=True
            )
            process.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def results(self, timeout: float = 120) -> list[Any]:
        """What the functions returned, or the exceptions that they raised, or None for the dead."""
        found: list[Any] = [None] * len(self.pipes)
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not end in time"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                # The pipe of a process that was killed just ends.
                with contextlib.suppress(EOFError):
                    found[rank] = pipe.recv()
        return found

    def close(self) -> None:
        """Kills what is left."""
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: str,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    try:
        result: Any = function(pipe, *args)
    except Exception as error:
        result = error
    pipe.send(result)
    pipe.close()
    # Without the goodbyes of the process group: a peer may be dead.
    os._exit(0)
