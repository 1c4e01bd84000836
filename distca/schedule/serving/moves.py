"""Blocks that move between ranks: to those that hold keys and values alone, or to equal shares.

Ranks without weights compute no keys and values, so new blocks always lie on others. A full block
of a long sequence moves to the server that its stripe belongs to, once it is computed. If ranks
that compute run out of blocks, more blocks move before a sequence has to give up its own.

A chain of prefill ranks leaves its first ranks the most keys and values, since these have the
fewest to attend to. Decoding reads all of them, so equal shares are read soonest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from distca.schedule.serving.blocks import Block, PrefixCache, SequenceBlocks


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
    blocks: SequenceBlocks
    settled: int

    @property
    def full(self) -> int:
        """Its blocks, the first ones, that are computed and full."""
        ...


def join_moves(moves: Iterable[BlockTransfer]) -> tuple[BlockTransfer, ...]:
    """Joins the moves of a block that changes its rank twice: all rows are copied at once."""
    joined: dict[Block, BlockTransfer] = {}
    for move in moves:
        before = joined.pop(move.source, move)
        joined[move.to] = replace(move, source=before.source)
    return tuple(joined.values())


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
        """Moves that many blocks away from ranks that compute, as far as there is room for them."""
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

    def even_out(
        self, sequences: Iterable[Movable], group: Collection[int] | None = None
    ) -> list[BlockTransfer]:
        """Moves blocks until ranks hold equal shares of a sequence, but for a block.

        The last blocks of a rank go, where no other sequence has them and there is room.

        Args:
            sequences: sequences.
            group: ranks that share them; None: all that compute.
        """
        moves, ranks = [], sorted(range(self._computing) if group is None else group)
        for each in sequences:
            held = Counter(each.blocks.ranks.tolist())
            mine: dict[int, list[int]] = {rank: [] for rank in ranks}
            for index, block in enumerate(each.blocks[: each.full]):
                if block.rank in mine and self._cache.has_one_holder(block):
                    mine[block.rank].append(index)
            while True:
                sources = [rank for rank in ranks if mine[rank]]
                targets = [rank for rank in ranks if self._cache.available(rank)]
                if not sources or not targets:
                    break
                source, to = max(sources, key=held.__getitem__), min(targets, key=held.__getitem__)
                if held[source] - held[to] <= 1:
                    break
                held[source] -= 1
                held[to] += 1
                moves.append(self._move(each, mine[source].pop(), to))
        return moves

    def _can_go(self, block: Block, rank: int) -> bool:
        here = block.rank < self._computing
        return here and self._cache.available(rank) > 0 and self._cache.has_one_holder(block)

    def _move(self, each: Movable, index: int, rank: int) -> BlockTransfer:
        source = each.blocks[index]
        to = self._cache.relocate(source, rank)
        each.blocks.replace(index, to)
        return BlockTransfer(each.number, index, source, to)
