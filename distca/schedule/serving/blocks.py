"""Blocks of the ranks' pools of keys and values: which are free, and how often each is referenced.

A block is `block_size` rows of one rank's pool. The engine owns this accounting, and tells ranks
which blocks they write to; they keep the rows. A block is given back when nothing references it any
more, so that sequences can share full blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from distca.cost.volume import AttentionShape

Blocks = tuple[tuple[int, ...], ...]
"""Numbers of blocks, by rank."""

NewBlocks = Mapping[tuple[int, int], Sequence[int]]
"""Blocks that a step adds behind those that a sequence has on a rank, by (sequence, rank)."""


def block_bytes(shape: AttentionShape, layers: int, block_size: int) -> int:
    """Returns the bytes of a block: keys and values of `block_size` rows in all layers."""
    elements = 2 * layers * block_size * shape.kv_heads * shape.head_dim
    return elements * shape.dtype_bytes


class NoFreeBlocks(Exception):
    """Raised if a rank's pool has fewer free blocks than are asked for; nothing has changed."""


class BlockPool:
    """The free and the referenced blocks of every rank's pool.

    Args:
        world_size: ranks.
        blocks_per_rank: blocks of each rank's pool.
        block_size: rows of a block.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(self, world_size: int, blocks_per_rank: int, block_size: int) -> None:
        if min(world_size, blocks_per_rank, block_size) < 1:
            raise ValueError(
                f"{world_size} ranks with {blocks_per_rank} blocks of {block_size} rows: give at "
                "least 1 of each"
            )
        self.world_size, self.block_size = world_size, block_size
        self.blocks_per_rank = blocks_per_rank
        # Heaps: the lowest free blocks are given first, so that a sequence's often lie side by
        # side, and kernels can read them as one run.
        self._free = [list(range(blocks_per_rank)) for _ in range(world_size)]
        self._references: list[dict[int, int]] = [{} for _ in range(world_size)]

    def free(self, rank: int) -> int:
        """Free blocks of a rank."""
        return len(self._free[rank])

    def referenced(self, rank: int) -> int:
        """Blocks of a rank that something references."""
        return len(self._references[rank])

    def references(self, rank: int, block: int) -> int:
        """Returns the number of references to a block."""
        return self._references[rank].get(block, 0)

    def has(self, counts: Sequence[int]) -> bool:
        """Returns whether every rank has as many free blocks as `counts` says for it."""
        return all(count <= self.free(rank) for rank, count in enumerate(counts))

    def allocate(self, counts: Sequence[int]) -> Blocks:
        """Takes so many free blocks of each rank, with one reference each: of all ranks, or none.

        Returns:
            The blocks of each rank, in rising order.

        Raises:
            NoFreeBlocks: a rank has too few.
        """
        for rank, count in enumerate(counts):
            if count > self.free(rank):
                raise NoFreeBlocks(
                    f"rank {rank} has {self.free(rank)} free blocks of {self.blocks_per_rank}, "
                    f"and {count} are needed"
                )
        taken = []
        for free, references, count in zip(self._free, self._references, counts, strict=True):
            blocks = tuple(heapq.heappop(free) for _ in range(count))
            references.update(dict.fromkeys(blocks, 1))
            taken.append(blocks)
        return tuple(taken)

    def take(self, rank: int) -> int:
        """Takes the lowest free block of a rank, with one reference; there must be one."""
        block = heapq.heappop(self._free[rank])
        self._references[rank][block] = 1
        return block

    def share(self, rank: int, blocks: Iterable[int]) -> None:
        """Adds a reference to each of these blocks, which have some already."""
        for block in blocks:
            assert block in self._references[rank], f"nothing references block {block}"
            self._references[rank][block] += 1

    def release(self, rank: int, blocks: Iterable[int]) -> None:
        """Takes a reference from each of these blocks; those without any are free again."""
        references = self._references[rank]
        for block in blocks:
            assert block in references, f"nothing references block {block}"
            references[block] -= 1
            if not references[block]:
                del references[block]
                heapq.heappush(self._free[rank], block)
