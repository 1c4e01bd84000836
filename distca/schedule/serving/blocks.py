"""Blocks of the ranks' pools of keys and values: who owns one, and which hold a known prefix.

A block is `block_size` rows of one rank's pool. The engine owns this accounting, and tells ranks
which blocks they write to; they keep the rows. A block is given back when nothing references it any
more, so that sequences can share full blocks.

A block covers consecutive positions of a sequence, all on one rank, so a block that is found needs
no new layout, whoever shared out the sequence that made it. It is found by a digest of all tokens
up to its end and of the model, so that only keys and values of the same prefix are ever shared. The
cache is one of a block's holders; blocks that it alone holds are given back, the least recently
used first, where a rank has none free.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan.span import Int64s

Blocks = tuple[tuple[int, ...], ...]
"""Numbers of blocks, by rank."""


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
        return self._references[rank].get(block, 0)

    def allocate(self, counts: Sequence[int]) -> Blocks:
        """Takes that many free blocks of each rank, with one reference each: of all ranks, or none.

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


class Block(NamedTuple):
    """A block of a rank's pool."""

    rank: int
    number: int


class SequenceBlocks(Sequence[Block]):
    """The blocks of a sequence, in the order of positions. The scheduler alone changes them.

    Args:
        blocks: the first ones.

    Attributes:
        ranks: the rank that owns each, int64 `[blocks]`.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._blocks = list(blocks)
        self.ranks: Int64s = np.array([block.rank for block in self._blocks], dtype=np.int64)

    def extend(self, blocks: Iterable[Block]) -> None:
        """Adds blocks behind the others."""
        count = len(self._blocks)
        self._blocks += blocks
        new = np.array([block.rank for block in self._blocks[count:]], dtype=np.int64)
        self.ranks = np.concatenate([self.ranks, new])

    def replace(self, index: int, block: Block) -> None:
        """Puts a block in the place of another."""
        self._blocks[index], self.ranks[index] = block, block.rank

    def of_rank(self, rank: int) -> list[int]:
        """Returns the numbers of a rank's blocks."""
        return [block.number for block in self._blocks if block.rank == rank]

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        return self._blocks[index]


def extend_digests(
    known: Sequence[bytes], tokens: Sequence[int], block_size: int, salt: bytes
) -> list[bytes]:
    """Returns a digest for each full block of a sequence: of all tokens up to the block's end.

    Args:
        known: digests that were made before the sequence grew.
        tokens: token ids.
        block_size: tokens of a block.
        salt: what else keys and values depend on: the model.
    """
    digests = list(known)
    begin, end = len(digests) * block_size, len(tokens) // block_size * block_size
    data = np.array(tokens[begin:end], dtype=np.int64).tobytes()
    size = block_size * np.dtype(np.int64).itemsize
    for at in range(0, len(data), size):
        before = digests[-1] if digests else salt
        digests.append(hashlib.sha256(before + data[at : at + size]).digest())
    return digests


class PrefixCache:
    """The blocks of all ranks' pools; full ones are found again by their content.

    A block is free, or referenced by sequences, or cached: held by the cache alone.

    Args:
        pool: pool that nobody else takes blocks from.

    Attributes:
        pool: see above.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._by_digest: dict[bytes, Block] = {}
        self._digests: dict[Block, bytes] = {}
        # Blocks without another holder, by rank, the least recently used first.
        self._idle: list[OrderedDict[Block, None]] = [OrderedDict() for _ in range(pool.world_size)]

    def free(self, rank: int) -> int:
        """Blocks of a rank that hold nothing."""
        return self.pool.free(rank)

    def cached(self, rank: int) -> int:
        """Blocks of a rank that the cache alone holds."""
        return len(self._idle[rank])

    def referenced(self, rank: int) -> int:
        """Blocks of a rank that sequences hold."""
        return self.pool.referenced(rank) - self.cached(rank)

    def available(self, rank: int) -> int:
        """Blocks of a rank that `take` can give."""
        return self.free(rank) + self.cached(rank)

    def take(self, rank: int) -> Block:
        """Takes a block, which must be `available`: a free one, or one that is evicted."""
        if not self.pool.free(rank):
            self._evict(rank)
        return Block(rank, self.pool.take(rank))

    def find(self, wanted: Iterable[bytes]) -> list[Block]:
        """Returns the blocks of the longest prefix that is kept, and makes the caller a holder.

        Args:
            wanted: digests of the prefix.
        """
        blocks: list[Block] = []
        for digest in wanted:
            block = self._by_digest.get(digest)
            if block is None:
                break
            self.pool.share(block.rank, [block.number])
            self._idle[block.rank].pop(block, None)
            blocks.append(block)
        return blocks

    def keep(self, block: Block, digest: bytes) -> None:
        """Keeps a full block that is computed, unless one with the same digest is kept already.

        Args:
            block: block.
            digest: what it is found by.
        """
        if digest not in self._by_digest and block not in self._digests:
            self._by_digest[digest] = block
            self._digests[block] = digest
            self.pool.share(block.rank, [block.number])

    def release(self, blocks: Sequence[Block]) -> None:
        """Ends the holding of a sequence's blocks, in its order: its last are given back first."""
        for block in reversed(blocks):
            self.pool.release(block.rank, [block.number])
            if block in self._digests and self.pool.references(*block) == 1:
                self._idle[block.rank][block] = None

    def has_one_holder(self, block: Block) -> bool:
        """Returns whether one sequence alone holds a block, beside the cache."""
        return self.pool.references(*block) == 1 + (block in self._digests)

    def relocate(self, block: Block, rank: int) -> Block:
        """Replaces a block that one sequence holds by one of another rank, found as it was."""
        to = self.take(rank)
        if (digest := self._digests.get(block)) is not None:
            self._forget(block)
            self.keep(to, digest)
        self.pool.release(block.rank, [block.number])
        return to

    def reset(self) -> None:
        """Forgets all blocks; those of sequences stay theirs."""
        for block in list(self._digests):
            self._forget(block)

    def _evict(self, rank: int) -> None:
        """Frees the least recently used of a rank's cached blocks."""
        self._forget(next(iter(self._idle[rank])))

    def _forget(self, block: Block) -> None:
        del self._by_digest[self._digests.pop(block)]
        self._idle[block.rank].pop(block, None)
        self.pool.release(block.rank, [block.number])
