"""Nodes of trees as documents of a plan: runs of nodes, each the parent of the next one.

A node is a run of tokens; its *path* is its parent's path and then its own tokens. Where a node
follows its parent, both are of one document, so that a conversation of a thousand turns is one
document, and not a thousand. Other nodes begin a document, which branches off where its parent
ends. Put the child with most below it first, and documents lie few below each other.

The tokens of a *two-way* node see all of the node, such as an image's. It is a document of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.span import Bools, Int64s

LEAST_SHARED = 128
"""Fewest first tokens that documents share by default: fewer are computed once for each."""


@dataclass(frozen=True)
class Paths:
    """Documents of nodes.

    Attributes:
        lengths: tokens of each document's path, int64 `[documents]`.
        parents: an earlier document, whose first tokens are those of each, or -1, likewise.
        prefix: how many of its tokens are the parent's, likewise.
        query_shift: see `Plan.query_shift`; None: no node is two-way.
        first_node: first node of each, likewise.
    """

    lengths: Int64s
    parents: Int64s
    prefix: Int64s
    query_shift: Int64s | None
    first_node: Int64s

    @property
    def family(self) -> tuple[Int64s, Int64s, Int64s | None]:
        """Parents, prefixes and shifts, as `TilesScheduler` takes them behind the lengths."""
        return self.parents, self.prefix, self.query_shift

    @staticmethod
    def of(own_lengths: Int64s, parents: Int64s, two_way: Bools | None = None) -> Paths:
        """Joins nodes to documents.

        Args:
            own_lengths: tokens of each node without those of its parent's path, int64 `[nodes]`.
            parents: an earlier node, or -1, int64 `[nodes]`.
            two_way: nodes whose tokens see all of the node, bool `[nodes]`, or None.
        """
        lengths = path_lengths(own_lengths, parents)
        opens = (parents != np.arange(len(parents)) - 1) | (parents < 0)
        if two_way is not None:
            opens |= two_way | two_way[parents]
        document, first = np.cumsum(opens) - 1, np.flatnonzero(opens)
        last = np.append(first[1:], len(parents))[: len(first)] - 1
        above, shift = parents[first], None
        if two_way is not None and two_way.any():
            shift = np.where(two_way[first], own_lengths[first], 0)
        return Paths(
            lengths[last],
            np.where(above < 0, -1, document[above]),
            np.where(above < 0, 0, lengths[above]),
            shift,
            first,
        )


def path_lengths(own_lengths: Int64s, parents: Int64s) -> Int64s:
    """Returns the tokens of each node's path, int64 `[nodes]`; the arguments are `Paths.of`'s."""
    found: list[int] = []
    for own, parent in zip(own_lengths.tolist(), parents.tolist(), strict=True):
        found.append(own if parent < 0 else own + found[parent])
    return np.array(found, dtype=np.int64)
