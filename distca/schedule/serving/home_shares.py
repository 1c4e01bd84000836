"""How many tokens each rank's own prompts are fed in an iteration, where ranks have equal shares.

A rank computes the layers of its own prompts, and all ranks wait for the one with most tokens. So
each is fed at most its share of an iteration's tokens, and a new prompt goes to the rank that has
least left to compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from distca.schedule.serving.blocks import PrefixCache
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request


class HomeShares:
    """What ranks can still be fed in an iteration.

    Args:
        cache: blocks of all ranks.
        computing: ranks that compute keys and values.
        limits: bounds and rules.
        running: sequences that run. Those that decode are fed one token each.
    """

    def __init__(
        self,
        cache: PrefixCache,
        computing: Sequence[int],
        limits: SchedulerConfig,
        running: Sequence[Request],
    ) -> None:
        self._cache, self._threshold = cache, limits.threshold
        share = -(-limits.max_num_batched_tokens // len(computing))
        self._left = dict.fromkeys(computing, share)
        self._backlog = dict.fromkeys(computing, 0)
        for each in filter(self._is_short, running):
            self._left[each.home] -= _decodes(each)
            self._backlog[each.home] += len(each.tokens) - each.computed
        # Prompts go on, however many answers a rank has.
        self._left = {rank: max(left, 1) for rank, left in self._left.items()}

    def most(self, each: Request) -> int:
        """Returns the most tokens that a sequence which runs is fed."""
        whole = _decodes(each) or not self._is_short(each)
        return len(each.tokens) if whole else self._left[each.home]

    def feed(self, each: Request, count: int) -> None:
        """Notes that a sequence which runs is fed tokens."""
        if self._is_short(each) and not _decodes(each):
            self._left[each.home] -= count

    def admit(self, each: Request) -> int:
        """Gives a sequence that waits a home; returns the most tokens that it is fed.

        It goes where least is left to compute, with what the cache already has of it taken off. A
        rank without room for its blocks comes last.
        """
        if not self._is_short(each):
            return len(each.tokens)
        size, held = self._cache.pool.block_size, each.blocks.ranks.tolist()
        missing = -(-len(each.tokens) // size) - len(held)
        free = [rank for rank, left in self._left.items() if left > 0]
        if not free:
            return 0
        each.home = min(
            free,
            key=lambda rank: (
                self._cache.available(rank) < missing,
                self._backlog[rank] - held.count(rank) * size,
                -self._cache.available(rank),
                rank,
            ),
        )
        return self._left[each.home]

    def admitted(self, each: Request, count: int) -> None:
        """Notes that a sequence which waited runs, and is fed tokens."""
        if self._is_short(each):
            self._left[each.home] -= count
            self._backlog[each.home] += len(each.tokens) - each.computed

    def _is_short(self, each: Request) -> bool:
        return len(each.tokens) < self._threshold


def _decodes(each: Request) -> bool:
    """Whether one token alone of a sequence is left to compute."""
    return len(each.tokens) - each.computed == 1
