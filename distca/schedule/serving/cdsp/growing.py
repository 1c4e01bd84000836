"""How a scheduler gives each long prompt ranks of its own, which grow from chunk to chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distca.schedule.serving.cdsp.chunks import NOBODY, PrefillPlan, Search
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.load import ImprovementRates, Load
from distca.schedule.serving.cdsp.strategies import strategy_of


@dataclass(frozen=True)
class GrowingGroups:
    """Chunks of prompts and their ranks, by measured seconds.

    Attributes:
        search: measured seconds of prefills, and thresholds.
        strategy: `cdsp`, or what it is compared with; see `cdsp.strategies`.
        ranks_per_node: rank `r` is on node `r // ranks_per_node`; None: all are on one node.
        rates: improvement rates by arrivals a second, in place of the search's own; None: the
            search's, at every load.

    Raises:
        ValueError: there is no such strategy, or the search bounds the tokens of a rank.
    """

    search: Search
    strategy: str = "cdsp"
    ranks_per_node: int | None = None
    rates: ImprovementRates | None = None

    def __post_init__(self) -> None:
        strategy_of(self.strategy)
        if self.search.tokens_per_rank != math.inf:
            raise ValueError("the scheduler knows the room of ranks: leave out tokens_per_rank")

    def seconds(self, ranks: int, cached: int, tokens: int) -> float:
        """Returns the seconds of a chunk; of a number of ranks that was not measured, those of the
        next smaller one that was."""
        times = self.search.times
        degree = max(each for each in times.degrees if each <= ranks)
        return times.seconds(degree, cached, tokens)

    def check(self, ranks: int) -> None:
        """Checks that prompts can be planned on this number of ranks.

        Raises:
            ValueError: there are fewer ranks than the smallest group that was measured, or the
                strategy has other groups.
        """
        if min(self.search.times.degrees) > ranks:
            raise ValueError(
                f"prefills were measured on {min(self.search.times.degrees)} ranks and more, and "
                f"there are {ranks}: measure them on fewer"
            )
        self.plan([0.0] * ranks, 1, 0, NOBODY)

    def load(self) -> Load | None:
        """Makes the record of arrivals by which improvement rates are chosen; None: they don't
        depend on the load."""
        return None if self.rates is None else Load(self.rates)

    def plan(
        self,
        queued: Sequence[float],
        tokens: int,
        cached: int,
        holders: Ranks,
        growth: tuple[float, float] | None = None,
    ) -> PrefillPlan | None:
        """Plans a prompt.

        Args:
            queued: seconds for which each rank still has prompts to compute.
            tokens: tokens to compute.
            cached: tokens before them whose keys and values exist.
            holders: ranks that hold these.
            growth: improvement rate, and most ranks of a group; None: the search's.

        Returns:
            Its chunks; None: more ranks hold its beginning than the largest group has.
        """
        degrees = [each for each in self.search.times.degrees if each <= len(queued)]
        if len(holders) > max(degrees):
            return None
        plan = strategy_of(self.strategy)
        nodes = self.ranks_per_node or len(queued)
        search = self.search
        if growth is not None:
            search = replace(search, improvement_rate=growth[0], most_ranks=growth[1])
        return plan(search, queued, nodes, tokens, cached, holders)
