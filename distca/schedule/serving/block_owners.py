"""Which ranks own the blocks that a sequence's next tokens need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.schedule.serving.blocks import PrefixCache
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request


class BlockOwners:
    """Choice of the ranks of new blocks, before it is known whether they have room.

    Args:
        cache: blocks of all ranks.
        computing: ranks that compute keys and values.
        limits: bounds and rules.
    """

    def __init__(self, cache: PrefixCache, computing: Sequence[int], limits: SchedulerConfig):
        self._cache, self._computing, self._limits = cache, computing, limits
        self._block_size = cache.pool.block_size

    def of_new_blocks(self, each: Request, count: int, blocks: int) -> list[int]:
        """Returns the owner of each block that a sequence's next tokens add.

        Args:
            each: sequence.
            count: tokens that are fed next.
            blocks: blocks that they add.
        """
        if each.pieces:
            piece = each.left[0] if each.left else each.pieces[-1]
            return self._evenly(each, blocks, sorted(piece.ranks), decoded=not each.left)
        return self._in_chain(each, count, blocks) or self._at_home(each, blocks)

    def home(self, each: Request, others: Sequence[int]) -> int:
        """Returns the rank of a short sequence.

        It is the one that holds most of it already, else one with few others and much room.

        Args:
            each: sequence.
            others: homes of the other sequences that run.
        """
        held = each.blocks.ranks.tolist()
        return min(
            self._computing,
            key=lambda rank: (
                -held.count(rank),
                others.count(rank),
                -self._cache.available(rank),
                rank,
            ),
        )

    def _at_home(self, each: Request, count: int) -> list[int]:
        """Returns owners of `count` new blocks: the home of a short sequence, else all ranks."""
        if len(each.tokens) < self._limits.threshold:
            return [each.home] * count
        return self._evenly(each, count, self._computing, each.computed >= each.prompt)

    def _evenly(self, each: Request, count: int, group: Sequence[int], decoded: bool) -> list[int]:
        """Returns owners of `count` new blocks, so that all ranks of a group have as many."""
        if not count:
            return []
        ranks, members = len(group), np.array(group)
        if decoded:
            blocks = len(each.blocks) + np.arange(count)
            stripes = blocks * self._block_size // self._limits.stripe
            return [*map(int, members[(stripes + each.number) % ranks])]
        part = np.arange(count) * 2 * ranks // count
        owners = np.minimum(part, 2 * ranks - 1 - part)
        if count % (2 * ranks):
            held = np.bincount(each.blocks.ranks, minlength=max(group) + 1)[members]
            more = np.bincount(owners, minlength=ranks)
            owners += min(range(ranks), key=lambda by: int(np.ptp(held + np.roll(more, by))))
        return [*map(int, members[owners % ranks])]

    def _in_chain(self, each: Request, count: int, blocks: int) -> list[int]:
        """Ranks of the blocks that a chunk adds, by the chain or the levels, if it has any."""
        long = each.chain is not None or len(each.tokens) >= self._limits.threshold
        chain = each.chain or self._limits.chain
        if chain is None or not long or each.computed >= each.prompt:
            return []
        return chain.owners(blocks, each.computed, each.computed + count)
