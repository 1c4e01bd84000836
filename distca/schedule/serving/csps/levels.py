"""Levels of proximity: how far two ranks are from each other, and which tokens are near them.

The paper's levels are nested, and each attends to all that is in its segment, so that near keys
count in several of them: that is not exact even where nothing is dropped. These are disjoint: a key
is in the one level that its owner is in, as seen from the query's owner.

A node has a stretch of the prompt, so that near tokens are in near nodes. The paper's ranks have
contiguous parts of it, too, and under a causal mask the last one has nearly twice the mean work.
In zigzag the ranks of a node have equal work, as many keys of their own, and the busiest link has
as many bytes; but half of a rank's own keys are not next to its other half, and more keys travel
within the node in all. What is left is the difference between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from distca.cost.link import Links
from distca.plan import Placement
from distca.plan.span import Int64s, cut_at

LEVELS = ("rank", "node", "rack", "cluster")
"""What two ranks of each level have in common: level 0 is the rank itself."""

NodeParts = Literal["zigzag", "contiguous"]
"""Parts that the ranks of a node have of its stretch."""

NODE_PARTS: tuple[NodeParts, ...] = get_args(NodeParts)


@dataclass(frozen=True)
class Levels:
    """Levels of pairs of ranks, and the tokens of each rank.

    Attributes:
        links: nodes and racks of the ranks.
        ranks: ranks that there are.
        node_parts: how the ranks of a node share its stretch.

    Raises:
        ValueError: racks are given that don't cover the ranks.
    """

    links: Links
    ranks: int
    node_parts: NodeParts = "zigzag"

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
        """Returns the level of each pair of ranks, by the number of its name in `LEVELS`."""
        apart = [one != other]
        apart += [place(one) != place(other) for place in (self.links.node, self.links.rack)]
        level: Int64s = np.sum(apart, axis=0, dtype=np.int64)
        return level

    @property
    def count(self) -> int:
        """Levels that some pair of ranks is in, those before the farthest included."""
        every = np.arange(self.ranks)
        return int(self.of(every, np.zeros_like(every)).max()) + 1

    @property
    def in_zigzag(self) -> int:
        """Ranks that share a stretch in zigzag; 1: each has one of its own."""
        whole = min(self.links.ranks_per_node, self.ranks)
        return whole if self.node_parts == "zigzag" else 1

    def shard(self, starts: Int64s, ends: Int64s) -> Placement:
        """Shards new tokens, equally many for each rank, and neighbours on ranks near each other.

        The longest sequence comes first; where its last part leaves room, the others follow, so
        that short prefills fill the last partition of a long one.

        Args:
            starts: first new position of each sequence, int64 `[sequences]`.
            ends: end of the new positions of each sequence, likewise; no new tokens are possible.
        """
        lengths = ends - starts
        order = np.argsort(-lengths, kind="stable")
        until = np.cumsum(lengths[order])
        owners, edges = self._chunks(int(lengths.sum()))
        line = until - lengths[order]
        source, start, end = cut_at(line, until, edges[:-1])
        document, begin = order[source], starts[order[source]] - line[source]
        rank = owners[np.searchsorted(edges, start, side="right")]
        return Placement(document, begin + start, begin + end, rank, self.ranks).joined()

    def owners(self, parts: int, start: int, end: int) -> list[int]:
        """Ranks of equal parts of the new tokens from `start` to `end`, wherever they are."""
        placed = self.shard(np.array([0]), np.array([parts]))
        placed = placed.select(np.argsort(placed.start))
        return [*map(int, np.repeat(placed.rank, placed.end - placed.start))]

    def _chunks(self, tokens: int) -> tuple[Int64s, Int64s]:
        """Owners and ends of all chunks that tokens are cut into, `[chunks]`: of each rank the
        first half of its tokens, and where ranks of its stretch have had theirs the second."""
        every = np.arange(self.ranks)
        share = np.diff(-(-np.arange(self.ranks + 1) * tokens // self.ranks))
        owners, half = np.tile(every, 2), np.repeat([0, 1], self.ranks)
        sizes = np.concatenate([share - share // 2, share // 2])
        order = np.lexsort((np.where(half, -owners, owners), half, owners // self.in_zigzag))
        order = order[sizes[order] > 0]
        return owners[order], np.cumsum(sizes[order])
