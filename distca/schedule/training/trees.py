"""Documents that are trees: conversations, or rollouts, that hold the tokens they share once.

A *node* is a run of tokens. Its *path* is the tokens of its parent's path, and then its own. A
token sees its own node up to itself, and all nodes above: what it would see if its path were a
document.
Plans join nodes to documents (`distca.plan.paths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.plan import LayerMasks, Placement, Plan
from distca.plan.paths import Paths, path_lengths
from distca.plan.span import Int64s, expand_ranges
from distca.schedule.tiles.scheduler import TilesScheduler


@dataclass(frozen=True)
class DocumentTrees:
    """The nodes of documents, in the order of the documents.

    The tokens of a document lie node by node, a parent before its children. An ordinary document
    has one node.

    Attributes:
        counts: nodes of each document, int64 `[documents]`.
        own_lengths: tokens of each node without those of its parent's path, int64 `[nodes]`.
        parents: an earlier node of the same document, numbered from 0 in it, or -1, int64
            `[nodes]`.
    """

    counts: Int64s
    own_lengths: Int64s
    parents: Int64s

    @staticmethod
    def of(documents: Sequence[tuple[Int64s, Int64s]]) -> DocumentTrees:
        """Joins the own lengths and parents of each document's nodes."""
        none = np.zeros(0, dtype=np.int64)
        own_lengths, parents = zip(*documents, strict=True) if documents else ((), ())
        return DocumentTrees(
            np.array([len(each) for each in own_lengths], dtype=np.int64),
            np.concatenate([none, *own_lengths]),
            np.concatenate([none, *parents]),
        )

    @staticmethod
    def joined(some: Sequence[DocumentTrees]) -> DocumentTrees:
        """Joins the documents of several values, in turn."""
        return DocumentTrees(
            np.concatenate([each.counts for each in some]),
            np.concatenate([each.own_lengths for each in some]),
            np.concatenate([each.parents for each in some]),
        )

    def select(self, documents: Int64s) -> DocumentTrees:
        """Returns some documents, by their numbers in any order."""
        first = (np.cumsum(self.counts) - self.counts)[documents]
        nodes = expand_ranges(first, self.counts[documents])
        return DocumentTrees(self.counts[documents], self.own_lengths[nodes], self.parents[nodes])

    @cached_property
    def document(self) -> Int64s:
        """Document of each node, `[nodes]`."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @cached_property
    def numbered_parents(self) -> Int64s:
        """Parent of each node, numbered over the nodes of all documents, or -1, `[nodes]`."""
        first = (np.cumsum(self.counts) - self.counts)[self.document]
        return np.where(self.parents < 0, -1, first + self.parents)

    @cached_property
    def lengths(self) -> Int64s:
        """Tokens of each node's path, `[nodes]`."""
        return path_lengths(self.own_lengths, self.numbered_parents)

    @cached_property
    def paths(self) -> Paths:
        """The documents of a plan."""
        return Paths.of(self.own_lengths, self.numbered_parents)

    @property
    def prefix(self) -> Int64s:
        """Tokens of each node's path that are its parent's, `[nodes]`."""
        return self.lengths - self.own_lengths

    @cached_property
    def offsets(self) -> Int64s:
        """Place of each node's first own token in its document, `[nodes]`."""
        before = np.cumsum(self.own_lengths) - self.own_lengths
        first_nodes = np.cumsum(self.counts) - self.counts
        return before - before[first_nodes][self.document]


def plan_trees(
    trees: DocumentTrees,
    scheduler: TilesScheduler,
    masks: LayerMasks,
    ranks: int,
    cached: Placement | None = None,
) -> list[Plan]:
    """Plans a micro-batch whose documents share tokens, with each mask and one placement.

    Args:
        trees: nodes of the documents; the plans have the documents `trees.paths`.
        scheduler: scheduler over the ranks of a stage.
        masks: masks of the layers.
        ranks: ranks of a stage, which divide the tokens with queries.
        cached: placement of the cached tokens, which begin the first tree's first path and have
            keys but no queries, or None.
    """
    paths, own = trees.paths, int(trees.own_lengths.sum())
    lengths, prefix = paths.lengths, paths.prefix.copy()
    if cached is not None:
        prefix[0] = int((cached.end - cached.start).sum())
        own -= int(prefix[0])
    family = paths.parents, prefix, paths.query_shift
    capacities = np.full(ranks, own // ranks, dtype=np.int64)
    first, *others = masks.masks
    plan = scheduler.plan(lengths, capacities, first, *family, cached)
    rest = (scheduler.schedule(lengths, plan.placement, mask, *family) for mask in others)
    return [plan, *rest]
