"""Random exchanges over a transport, whose bytes are known beforehand: they prove that it works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from distca.transport.base import (
    DIRECTIONS,
    Channel,
    ChannelBytes,
    MessageSizes,
    Pending,
    Transport,
)

Matrix = NDArray[np.int64]
CHANNELS = [Channel(direction, slot) for slot in (0, 1) for direction in DIRECTIONS]
_NOISE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8))


def sizes_of(matrix: Matrix, rank: int) -> MessageSizes:
    """Returns one rank's view of the bytes from each rank to each, int64 `[ranks, ranks]`."""
    before = np.cumsum(matrix, axis=0) - matrix
    columns = matrix[rank], matrix[:, rank], before[rank]
    return MessageSizes(*(tuple(map(int, column)) for column in columns))


def message(epoch: int, source: int, destination: int, nbytes: int) -> torch.Tensor:
    """Returns what a source sends in the exchange of this number, uint8 `[nbytes]`."""
    begin = (epoch * 7919 + source * 104_729 + destination * 1301) % (len(_NOISE) - nbytes)
    return _NOISE[begin : begin + nbytes]


@dataclass
class Exchanges:
    """Random exchanges, the same on all ranks, in ping-pong order on all channels.

    Attributes:
        transport: transport that is checked.
        seed: seed of sizes and order.
        largest: most bytes of a message.
        read_slowly: whether ranks sleep now and then between arrival and reading.
        reserve_often: whether the buffers are allocated anew now and then.
        before: function that is called with the number of each exchange before it.
        members: ranks of the exchanges, in turn; others do not start them. Empty: always all.
    """

    transport: Transport
    seed: int = 0
    largest: int = 20_000
    read_slowly: bool = False
    reserve_often: bool = True
    before: Callable[[int], None] = lambda number: None
    members: Sequence[Sequence[int]] = ()

    def run(self, exchanges: int) -> int:
        """Does exchanges; returns the number of wrong bytes that this rank received. Collective.

        Args:
            exchanges: number of exchanges.
        """
        ranks, rng = self.transport.world_size, np.random.default_rng(self.seed)
        under_way: dict[Channel, tuple[int, Matrix, Pending]] = {}
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

    def _start(self, channel: Channel, epoch: int, matrix: Matrix) -> Pending:
        rank = self.transport.rank
        sizes = sizes_of(matrix, rank)
        staging = self.transport.staging(channel, sum(sizes.send))
        pieces = [message(epoch, rank, peer, n) for peer, n in enumerate(sizes.send)]
        staging.copy_(torch.cat(pieces))
        return self.transport.start(channel.direction, channel, sizes)

    def _finish(self, started: tuple[int, Matrix, Pending]) -> int:
        epoch, matrix, pending = started
        rank = self.transport.rank
        received = pending.wait()
        if self.read_slowly and (epoch + rank) % 7 == 0:
            time.sleep(0.002)
        sizes = sizes_of(matrix, rank)
        expected = [message(epoch, peer, rank, n) for peer, n in enumerate(sizes.receive)]
        wrong = int((received.cpu() != torch.cat(expected)).sum())
        received.fill_(0xEE)
        pending.release()
        return wrong
