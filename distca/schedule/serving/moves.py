"""Blocks that move from the ranks that computed them to ranks that hold keys and values alone.

Ranks without weights compute no keys and values, so that new blocks always lie on others. A full
block of a long sequence whose stripe is of such a rank goes there once it is computed; if ranks
that compute run out of blocks, more do, before a sequence has to give up its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from distca.schedule.serving.prefix_cache import Block, PrefixCache


@dataclass(frozen=True)
class BlockTransfer:
    """A block that changes its rank; its rows are copied before those of the iteration are written.

    Attributes:
        sequence: sequence that has it.
        index: number of the block among the sequence's.
        source: where its rows lie.
        to: where they will.
    """

    sequence: int
    index: int
    source: Block
    to: Block


class Movable(Protocol):
    """What is known of a sequence whose blocks move."""

    number: int
    blocks: list[Block]
    settled: int

    @property
    def full(self) -> int:
        """Its blocks, the first ones, that are computed and full."""
        ...


class Mover:
    """Moves of an iteration.

    Args:
        cache: blocks of all ranks.
        servers: ranks without weights, the last ones.
        stripe: consecutive positions of a sequence that one rank owns.
    """

    def __init__(self, cache: PrefixCache, servers: int, stripe: int) -> None:
        self._cache, self._world_size = cache, cache.pool.world_size
        self._computing = self._world_size - servers
        self._blocks_of_stripe = stripe // cache.pool.block_size

    def settle(self, sequences: Iterable[Movable]) -> list[BlockTransfer]:
        """Moves blocks that became full since to the ranks of their stripes."""
        moves = []
        for each in sequences:
            for index in range(each.settled, each.full):
                stripe = index // self._blocks_of_stripe
                rank = (stripe + each.number) % self._world_size
                if rank >= self._computing and self._can_go(each.blocks[index], rank):
                    moves.append(self._move(each, index, rank))
            each.settled = each.full
        return moves

    def make_room(self, sequences: Sequence[Movable], blocks: int) -> list[BlockTransfer]:
        """Moves so many blocks away from ranks that compute, as far as there is room for them."""
        moves: list[BlockTransfer] = []
        servers = range(self._computing, self._world_size)
        for each in sequences:
            for index in range(each.full):
                if len(moves) == blocks or not servers:
                    return moves
                rank = max(servers, key=self._cache.available)
                if self._can_go(each.blocks[index], rank):
                    moves.append(self._move(each, index, rank))
        return moves

    def _can_go(self, block: Block, rank: int) -> bool:
        here = block.rank < self._computing
        return here and self._cache.available(rank) > 0 and self._cache.has_one_holder(block)

    def _move(self, each: Movable, index: int, rank: int) -> BlockTransfer:
        source = each.blocks[index]
        to = each.blocks[index] = self._cache.relocate(source, rank)
        return BlockTransfer(each.number, index, source, to)
