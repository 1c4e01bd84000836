"""Which blocks sequences have on every rank, as steps fill them: the owner of the pools' accounts.

An engine owns it, or every rank alike; ranks are told the blocks that a step adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan.span import Int64s
from distca.schedule.serving.blocks import BlockPool, NoFreeBlocks

NewBlocks = Mapping[tuple[int, int], Sequence[int]]
"""Blocks that a step adds behind those that a sequence has on a rank, by (sequence, rank)."""


def block_bytes(shape: AttentionShape, layers: int, block_size: int) -> int:
    """Returns the bytes of a block: keys and values of `block_size` rows in all layers."""
    elements = 2 * layers * block_size * shape.kv_heads * shape.head_dim
    return elements * shape.dtype_bytes


@dataclass(frozen=True)
class Growth:
    """Rows of some sequences on every rank, before a step and after it.

    Attributes:
        sequences: sequences, each once.
        before: rows before the step, int64 `[sequences, ranks]`.
        after: rows after it, likewise.
    """

    sequences: tuple[int, ...]
    before: Int64s
    after: Int64s

    def blocks(self, block_size: int) -> Int64s:
        """Blocks that the step adds, int64 `[sequences, ranks]`."""
        return -(-self.after // block_size) - -(-self.before // block_size)


class Accounts:
    """The blocks of every sequence.

    Args:
        pool: blocks of all ranks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._blocks: dict[int, list[list[int]]] = {}

    def blocks(self, sequence: int) -> Sequence[Sequence[int]]:
        """Blocks of a sequence on each rank, in the order of its rows."""
        return self._blocks.get(sequence, [[] for _ in range(self.pool.world_size)])

    def fits(self, growth: Growth) -> bool:
        """Returns whether there are blocks for a step."""
        return self.pool.has(growth.blocks(self.pool.block_size).sum(axis=0).tolist())

    def take(self, growth: Growth) -> NewBlocks:
        """Takes the blocks that a step needs.

        Raises:
            NoFreeBlocks: a rank has too few; nothing has changed.
        """
        needed = growth.blocks(self.pool.block_size)
        taken = [iter(each) for each in self.pool.allocate(needed.sum(axis=0).tolist())]
        found: dict[tuple[int, int], list[int]] = {}
        for number, rank in zip(*(each.tolist() for each in np.nonzero(needed)), strict=True):
            sequence, count = growth.sequences[number], int(needed[number, rank])
            blocks = found[sequence, rank] = [next(taken[rank]) for _ in range(count)]
            theirs = self._blocks.setdefault(sequence, [[] for _ in range(self.pool.world_size)])
            theirs[rank] += blocks
        return found

    def resize(self, growth: Growth) -> NewBlocks:
        """Takes the blocks that sequences need, and gives those at their ends back that they don't.

        Raises:
            NoFreeBlocks: a rank has too few; nothing has changed.
        """
        grown = np.maximum(growth.after, growth.before)
        added = self.take(replace(growth, after=grown))
        surplus = replace(growth, before=grown).blocks(self.pool.block_size)
        for number, rank in zip(*(each.tolist() for each in np.nonzero(surplus)), strict=True):
            blocks, left = self._blocks[growth.sequences[number]][rank], int(surplus[number, rank])
            self.pool.release(rank, blocks[left:])
            del blocks[left:]
        return added

    def drop(self, sequence: int) -> None:
        """Gives the blocks of a sequence back, if it has any."""
        for rank, blocks in enumerate(self._blocks.pop(sequence, [])):
            self.pool.release(rank, blocks)


__all__ = ["Accounts", "Growth", "NewBlocks", "NoFreeBlocks", "block_bytes"]
