"""Blocks of prompts on prefill ranks, chunk by chunk: cache balancing, and where new tokens go.

A block is `block_size` consecutive positions of a prompt, on one rank. When a prompt's group grows,
every member is to have an even share of the blocks so far: those that have more give their last
ones to those that have fewer, so that growing from n to 2n ranks moves half of the rows and nothing
moves between old members. New blocks fill everyone's share up, in zigzag, so that all members
compute equally many and equally late queries.

All blocks that a prompt will need are reserved when it is planned: chunks that wait for blocks
could wait for each other. Blocks of a prefix that was cached are shared with others: they are never
written to, and stay where they are if their rows are copied to another rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.pieces import Piece
from distca.schedule.serving.prefix_cache import Block, PrefixCache


class Move(NamedTuple):
    """A block that changes its rank: its rows are copied from one block to another."""

    source: Block
    to: Block


@dataclass(frozen=True)
class PieceBlocks:
    """The blocks that a chunk is computed with.

    Attributes:
        blocks: blocks of all positions up to the chunk's end.
        moves: copies that come before the chunk's own rows are written.
    """

    blocks: tuple[Block, ...]
    moves: tuple[Move, ...]


def share_out(count: int, held: Counter[int], group: Ranks) -> dict[int, int]:
    """Blocks that each member should have of `count`: evenly, one more for those that have most."""
    each, more = divmod(count, len(group))
    by_held = sorted(group, key=lambda rank: (-held[rank], rank))
    return {rank: each + (place < more) for place, rank in enumerate(by_held)}


def balance(owners: Sequence[int], group: Ranks) -> list[int]:
    """Owners of blocks after their group has grown: even shares, by the fewest moves.

    Args:
        owners: owner of each block, all of them members.
        group: the grown group.
    """
    shares = share_out(len(owners), Counter(owners), group)
    after, left = list(owners), dict(shares)
    given = []
    for number, owner in enumerate(owners):
        if left[owner]:
            left[owner] -= 1
        else:
            given.append(number)
    lacking = [rank for rank in sorted(group) for _ in range(left[rank])]
    for number, rank in zip(given, lacking, strict=True):
        after[number] = rank
    return after


def place_new(owners: Sequence[int], count: int, group: Ranks) -> list[int]:
    """Owners of `count` new blocks behind others: in zigzag, so that all shares are even then."""
    held = Counter(owners)
    shares = share_out(len(owners) + count, held, group)
    missing = [(rank, shares[rank] - held[rank]) for rank in sorted(group)]
    early = [rank for rank, blocks in missing for _ in range(-(-blocks // 2))]
    late = [rank for rank, blocks in reversed(missing) for _ in range(blocks // 2)]
    return early + late


class PrefillBlocks:
    """The blocks of all prompts on prefill ranks.

    Args:
        cache: blocks of the ranks, and those of prefixes that are kept.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._spare: dict[int, list[list[int]]] = {}
        self._blocks: dict[int, list[Block]] = {}
        self._found: dict[int, frozenset[Block]] = {}

    def reserve(self, sequence: int, pieces: Sequence[Piece], found: Sequence[Block] = ()) -> bool:
        """Takes the blocks that a prompt's chunks need, if there are so many.

        Args:
            sequence: number of the prompt.
            pieces: its chunks.
            found: blocks of its cached prefix, of which the caller was a holder, and it is then.
        """
        needed = self._needed(pieces, found)
        if any(self._cache.available(rank) < count for rank, count in enumerate(needed)):
            return False
        taken = ([self._cache.take(rank).number for _ in range(n)] for rank, n in enumerate(needed))
        # The lowest numbers are taken from the end first.
        self._spare[sequence] = [each[::-1] for each in taken]
        self._blocks[sequence] = list(found)
        self._found[sequence] = frozenset(found)
        return True

    def _needed(self, pieces: Sequence[Piece], found: Sequence[Block]) -> list[int]:
        """Blocks of its own that a prompt needs on each rank at once."""
        needed = [0] * self._cache.pool.world_size
        owners, shared = [block.rank for block in found], [True] * len(found)
        for piece in pieces:
            after = balance(owners, piece.ranks)
            shared = [s and old == new for s, old, new in zip(shared, owners, after, strict=True)]
            new = place_new(after, self._count(piece.end) - len(after), piece.ranks)
            owners, shared = after + new, shared + [False] * len(new)
            own = Counter(rank for rank, s in zip(owners, shared, strict=True) if not s)
            needed = [max(count, own[rank]) for rank, count in enumerate(needed)]
        return needed

    def begin(self, sequence: int, piece: Piece) -> PieceBlocks:
        """Gives a chunk its blocks, once the chunks before it are computed."""
        blocks, spare = self._blocks[sequence], self._spare[sequence]
        after = balance([block.rank for block in blocks], piece.ranks)
        moves = []
        for number, (block, rank) in enumerate(zip(blocks, after, strict=True)):
            if block.rank != rank:
                blocks[number] = Block(rank, spare[rank].pop())
                moves.append(Move(block, blocks[number]))
        # Their rows leave before the chunk's own are written.
        for move in moves:
            if move.source not in self._found[sequence]:
                spare[move.source.rank].append(move.source.number)
        for rank in place_new(after, self._count(piece.end) - len(blocks), piece.ranks):
            blocks.append(Block(rank, spare[rank].pop()))
        return PieceBlocks(tuple(blocks), tuple(moves))

    def blocks(self, sequence: int) -> Sequence[Block]:
        """Blocks of the chunks of a prompt that have begun, in the order of positions."""
        return self._blocks[sequence]

    def release(self, sequence: int, digests: Sequence[bytes] = ()) -> None:
        """Gives all blocks of a prompt back.

        Args:
            sequence: number of the prompt.
            digests: what its first blocks are found by from now on: those that are computed.
        """
        blocks = self._blocks.pop(sequence)
        for block, digest in zip(blocks, digests, strict=False):
            self._cache.keep(block, digest)
        left = self._found.pop(sequence) - {*blocks}
        spare = self._spare.pop(sequence)
        unused = [Block(rank, number) for rank, each in enumerate(spare) for number in each]
        self._cache.release([*blocks, *left, *unused])

    def _count(self, tokens: int) -> int:
        return -(-tokens // self._cache.pool.block_size)
