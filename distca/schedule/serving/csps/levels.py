"""Levels of proximity: how far two ranks are from each other.

The paper's levels are nested, and each attends to all that is in its segment, so that near keys
count in several of them: that is not exact even where nothing is dropped. These are disjoint: a key
is in the one level that its owner is in, as seen from the query's owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.link import Links
from distca.plan.span import Int64s

LEVELS = ("rank", "node", "rack", "cluster")
"""What two ranks of each level have in common: level 0 is the rank itself."""


@dataclass(frozen=True)
class Levels:
    """Levels of pairs of ranks.

    Attributes:
        links: nodes and racks of the ranks.
        ranks: ranks that there are.

    Raises:
        ValueError: racks are given that don't cover the ranks.
    """

    links: Links
    ranks: int

    def __post_init__(self) -> None:
        size, nodes = self.links.ranks_per_node, self.links.nodes_per_rack
        if self.ranks < 1:
            raise ValueError(f"{self.ranks} ranks have no levels: give at least 1")
        if nodes is not None and self.ranks % (size * nodes):
            raise ValueError(
                f"racks of {nodes} nodes of {size} ranks don't cover {self.ranks} ranks: give a "
                f"number of nodes a rack by which the {-(-self.ranks // size)} nodes can be divided"
            )

    def of(self, one: Int64s, other: Int64s) -> Int64s:
        """The level of each pair of ranks, by the number of its name in `LEVELS`."""
        apart = [one != other]
        apart += [place(one) != place(other) for place in (self.links.node, self.links.rack)]
        level: Int64s = np.sum(apart, axis=0, dtype=np.int64)
        return level

    @property
    def count(self) -> int:
        """Levels that some pair of ranks is in, those before the farthest included."""
        every = np.arange(self.ranks)
        return int(self.of(every, np.zeros_like(every)).max()) + 1
