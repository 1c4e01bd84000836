"""Prompts in line before the prefill ranks, one prompt in a batch."""

from __future__ import annotations

from dataclasses import replace

from distca.schedule.serving.cdsp.chunks import NOBODY, PrefillPlan, Search
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.load import Load
from distca.schedule.serving.cdsp.strategies import Strategy


class PrefillQueue:
    """Prefill ranks, and until when each is taken by what was planned.

    A prompt is planned when it arrives, and ranks compute chunks in the order of arrival.

    Args:
        ranks: prefill ranks.
        ranks_per_node: rank `r` is on node `r // ranks_per_node`.
        search: times and thresholds.
        strategy: what gives a prompt its ranks.
        load: what tells how far groups may grow; None: what `search` says stays.

    Attributes:
        free_at: time at which each rank has done what it was given.
    """

    def __init__(
        self,
        ranks: int,
        ranks_per_node: int,
        search: Search,
        strategy: Strategy,
        load: Load | None = None,
    ) -> None:
        self.free_at = [0.0] * ranks
        self._ranks_per_node, self._search = ranks_per_node, search
        self._strategy, self._load = strategy, load

    def arrived(self, now: float) -> None:
        """Notes an arrival."""
        if self._load is not None:
            self._load.arrived(now)

    def plan(
        self, now: float, tokens: int, cached: int = 0, holders: Ranks = NOBODY
    ) -> PrefillPlan:
        """Plans a prompt, which takes no ranks yet; times of the plan count from now.

        Args:
            now: time.
            tokens: its tokens that are not cached.
            cached: tokens before them.
            holders: ranks that hold those.

        Raises:
            ValueError: no group of ranks can hold it.
        """
        search = self._search
        if self._load is not None:
            rate, most_ranks = self._load.growth(now)
            search = replace(search, improvement_rate=rate, most_ranks=most_ranks)
        queued = [max(0.0, free - now) for free in self.free_at]
        return self._strategy(search, queued, self._ranks_per_node, tokens, cached, holders)

    def place(self, now: float, tokens: int) -> PrefillPlan:
        """Plans a prompt that arrives now, and gives it its ranks.

        Raises:
            ValueError: no group of ranks can hold it.
        """
        self.arrived(now)
        plan = self.plan(now, tokens)
        for rank in plan.chunks[-1].ranks:
            self.free_at[rank] = now + plan.ttft
        return plan
