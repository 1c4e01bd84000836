"""Groups of ranks that grow from chunk to chunk: each long sequence gets ranks of its own.

Tetris' chunkwise dynamic sequence parallelism, as a choice of the scheduler. When a sequence is
admitted, its chunks and their ranks are planned by the seconds for which each rank still has
prompts to compute. Groups are nested, so keys and values only move to new members.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from distca.schedule.serving.blocks import PrefixCache, SequenceBlocks
from distca.schedule.serving.cdsp.chunks import Piece, cut_at_blocks
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request


class GroupGiver:
    """What gives sequences their ranks.

    Args:
        cache: blocks of all ranks.
        ranks: number of ranks that compute, the first ones.
        limits: bounds and rules.
        growing: how groups grow.
    """

    def __init__(
        self, cache: PrefixCache, ranks: int, limits: SchedulerConfig, growing: GrowingGroups
    ) -> None:
        self._cache, self._ranks, self._limits, self._growing = cache, ranks, limits, growing
        self._load = growing.load()
        self._now = 0.0
        # Tokens that each rank can still be fed in the iteration that is scheduled.
        self._left: list[int] = []

    def begin(self) -> None:
        """Begins an iteration, in which each rank computes its share of the most tokens.

        Groups compute side by side then, and none waits long for the others to end the iteration.
        """
        self._left = [max(self._limits.max_num_batched_tokens // self._ranks, 1)] * self._ranks

    def most(self, each: Request) -> int:
        """Returns the most tokens of a sequence's chunk that its ranks can still be fed."""
        ranks = each.left[0].ranks
        return min(self._left[rank] for rank in ranks) * len(ranks)

    def feed(self, each: Request, count: int) -> None:
        """Notes that tokens of a sequence's chunk are fed."""
        for piece in each.left[:1]:
            for rank in piece.ranks:
                self._left[rank] -= -(-count // len(piece.ranks))

    def arrived(self, now: float) -> None:
        """Notes that a sequence has arrived, at a time in seconds that never goes back."""
        self._now = now
        if self._load is not None:
            self._load.arrived(now)

    def give(self, each: Request, running: Sequence[Request]) -> None:
        """Gives a long sequence its chunks; the blocks that it has may go.

        Args:
            each: sequence, with the blocks that the prefix cache has of it.
            running: sequences that run, in the order in which they were admitted.
        """
        if len(each.tokens) < self._limits.threshold:
            return
        # Ranks without weights are in no group.
        holders = frozenset(rank for rank in each.blocks.ranks.tolist() if rank < self._ranks)
        left = len(each.tokens) - each.computed
        if each.group is not None:
            each.pieces = (Piece(each.computed, len(each.tokens), each.group),)
            return
        growth = None if self._load is None else self._load.growth(self._now)
        plan = self._growing.plan(self._queued(running), left, each.computed, holders, growth)
        if plan is None:
            each.pieces = (Piece(each.computed, len(each.tokens), holders),)
            return
        each.pieces = cut_at_blocks(plan.chunks, self._cache.pool.block_size)
        if each.pieces[0].start < each.computed:
            # It is computed sooner without the ranks that hold its beginning.
            self._cache.release(each.blocks)
            each.blocks, each.computed = SequenceBlocks(), 0

    def _queued(self, running: Iterable[Request]) -> list[float]:
        """Seconds for which each rank still has prompts to compute."""
        free = [0.0] * self._ranks
        for each in running:
            for piece in each.left:
                start = max(piece.start, each.computed)
                seconds = self._growing.seconds(len(piece.ranks), start, piece.end - start)
                end = max(free[rank] for rank in piece.ranks) + seconds
                for rank in piece.ranks:
                    free[rank] = end
        return free


def grown(running: Iterable[Request]) -> Iterator[tuple[Request, Ranks]]:
    """Yields sequences that begin a chunk with more ranks than the one before, with its ranks."""
    for each in running:
        for piece in each.pieces[1:]:
            if piece.start == each.computed:
                yield each, piece.ranks
