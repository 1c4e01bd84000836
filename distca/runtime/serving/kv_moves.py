"""Blocks of keys and values that change their rank, layer by layer.

`KvMoves.begins` sends the rows of the next layer and waits for those of its own. A caller that
calls it between layers hides moves behind compute
(`benchmarks/serving/cache_balancing.py`). The engine moves all layers before an iteration. Rows are
copied out of the pool when they leave, so that their blocks can be written to in the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import torch

from distca.runtime.serving.kv_pool import KVCache
from distca.schedule.serving.blocks import Block
from distca.schedule.serving.moves import BlockTransfer
from distca.transport import Channel, ChannelBytes, MessageSizes, Pending, Transport

PHASE = "cache balancing"
_SLOTS = 2


class KvMoves:
    """One rank's part of the moves of a step.

    Args:
        pool: keys and values of this rank.
        transport: transport between the ranks, which nothing else uses.
        moves: moves of all ranks, at least one, in an order that all of them know.
    """

    def __init__(self, pool: KVCache, transport: Transport, moves: Sequence[BlockTransfer]) -> None:
        self._pool, self._transport = pool, transport
        mine = transport.rank
        leaving = sorted((m for m in moves if m.source.rank == mine), key=lambda m: m.to.rank)
        coming = sorted((m for m in moves if m.to.rank == mine), key=lambda m: m.source.rank)
        self._leaving = self._blocks([m.source for m in leaving])
        self._coming = self._blocks([m.to for m in coming])
        block = 2 * pool.keys[0, :1].nbytes
        to = Counter(m.to.rank for m in leaving)
        source = Counter(m.source.rank for m in coming)
        ranks = range(transport.world_size)
        self._sizes = MessageSizes(
            tuple(to[rank] * block for rank in ranks),
            tuple(source[rank] * block for rank in ranks),
            _put_at(moves, mine, len(ranks), block),
        )
        self._pending: dict[int, Pending] = {}
        # Memory that ranks share has one size on all of them, also on those without a move.
        sent = Counter(m.source.rank for m in moves)
        received = Counter(m.to.rank for m in moves)
        room = ChannelBytes(max(sent.values()) * block, max(received.values()) * block)
        transport.reserve({_channel(slot): room for slot in range(_SLOTS)})
        if self._sizes.sent or self._sizes.received:
            self._start(0)

    @property
    def bytes_planned(self) -> int:
        """Bytes that this rank sends, in all layers."""
        return self._sizes.sent * self._pool.keys.shape[0]

    def begins(self, layer: int) -> None:
        """Lets the next layer's rows leave, and puts this layer's where they belong."""
        if layer not in self._pending:
            return
        if layer + 1 < self._pool.keys.shape[0]:
            self._start(layer + 1)
        pending = self._pending.pop(layer)
        rows = self._rows(pending.wait(), len(self._coming))
        for memory, kind in zip((self._pool.keys, self._pool.values), range(2), strict=True):
            memory[layer].index_copy_(0, self._coming, rows[:, kind])
        pending.release()

    def _start(self, layer: int) -> None:
        channel = _channel(layer % _SLOTS)
        staged = self._transport.staging(channel, self._sizes.sent)
        rows = self._rows(staged, len(self._leaving))
        for memory, kind in zip((self._pool.keys, self._pool.values), range(2), strict=True):
            rows[:, kind] = memory[layer][self._leaving]
        self._pending[layer] = self._transport.start(PHASE, channel, self._sizes)

    def _blocks(self, blocks: Sequence[Block]) -> torch.Tensor:
        numbers = [block.number for block in blocks]
        return torch.tensor(numbers, dtype=torch.int64, device=self._pool.keys.device)

    def _rows(self, message: torch.Tensor, blocks: int) -> torch.Tensor:
        """Blocks of a message: `[blocks, 2, block_size, kv_heads, head_dim]`."""
        shape = blocks, 2, *self._pool.keys.shape[2:]
        return message.view(self._pool.keys.dtype).view(shape)


def _channel(slot: int) -> Channel:
    return Channel("dispatch", slot)


def _put_at(
    moves: Sequence[BlockTransfer], rank: int, world_size: int, block: int
) -> tuple[int, ...]:
    """Returns where this rank's message begins in each rank's receive buffer."""
    sent = Counter((move.to.rank, move.source.rank) for move in moves)
    before = ([0, *accumulate(sent[to, r] for r in range(rank))] for to in range(world_size))
    return tuple(each[rank] * block for each in before)
