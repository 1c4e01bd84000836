"""The documents of a plan: documents of a micro-batch, and the nodes of its trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from distca.library.documents import IGNORED, Document
from distca.library.trees import Tree
from distca.plan import Placement
from distca.plan.span import Int64s, expand_ranges


@dataclass(frozen=True)
class Nodes:
    """Documents of a plan, a number for each document and for each node of a tree.

    The *own tokens* of all of them are numbered one after the other.

    Attributes:
        documents: documents and trees of the micro-batch.
    """

    documents: tuple[Document | Tree, ...]

    @cached_property
    def counts(self) -> list[int]:
        """Nodes of each document of the micro-batch."""
        return [len(each.nodes) if isinstance(each, Tree) else 1 for each in self.documents]

    @property
    def have_trees(self) -> bool:
        return any(isinstance(each, Tree) for each in self.documents)

    @cached_property
    def tokens(self) -> list[torch.Tensor]:
        """Own tokens of each node, int64 `[tokens]`."""
        found: list[torch.Tensor] = []
        for each in self.documents:
            found += each.nodes if isinstance(each, Tree) else [each.tokens]
        return found

    @cached_property
    def own_lengths(self) -> Int64s:
        """Own tokens of each node, `[nodes]`."""
        return np.array([len(each) for each in self.tokens], dtype=np.int64)

    @cached_property
    def first(self) -> Int64s:
        """Number of the first own token of each node, `[nodes]`."""
        return np.cumsum(self.own_lengths) - self.own_lengths

    @cached_property
    def parents(self) -> Int64s:
        """Parent of each node, or -1, `[nodes]`."""
        found: list[int] = []
        for each in self.documents:
            before = len(found)
            parents = each.parents if isinstance(each, Tree) else (-1,)
            found += [parent if parent < 0 else parent + before for parent in parents]
        return np.array(found, dtype=np.int64)

    @cached_property
    def lengths(self) -> Int64s:
        """Tokens of each node's path, `[nodes]`."""
        found = self.own_lengths.copy()
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                found[node] += found[parent]
        return found

    @cached_property
    def predictions(self) -> tuple[Int64s, Int64s, torch.Tensor, torch.Tensor]:
        """All that is predicted: numbers of the tokens that predict, rising, of those that are
        predicted (of a document the same plus one), targets and weights, `[predictions]` each."""
        sources, predicted, targets, weights = [], [], [], []
        node = 0
        for each, count in zip(self.documents, self.counts, strict=True):
            if isinstance(each, Document):
                next_tokens = each.next_tokens
                found = np.flatnonzero((next_tokens != IGNORED).numpy())
                sources.append(self.first[node] + found)
                predicted.append(sources[-1] + 1)
                targets.append(next_tokens[torch.from_numpy(found)])
                weights.append(torch.ones(len(found)))
            else:
                for number, parent in enumerate(each.parents):
                    first, tokens = int(self.first[node + number]), each.nodes[number]
                    numbers = first + np.arange(len(tokens))
                    before = numbers - 1
                    if parent >= 0:
                        before[0] = self.first[node + parent] + len(each.nodes[parent]) - 1
                    # Nothing predicts a tree's first token.
                    kept = slice(1 if parent < 0 else 0, None)
                    sources.append(before[kept])
                    predicted.append(numbers[kept])
                    targets.append(tokens[kept])
                    weights.append(each.weights[number][kept])
            node += count
        source = np.concatenate(sources)
        order = np.argsort(source, kind="stable")
        by = torch.from_numpy(order)
        return (
            source[order],
            np.concatenate(predicted)[order],
            torch.cat(targets)[by],
            torch.cat(weights)[by],
        )

    def of_rank(self, placement: Placement, rank: int) -> Int64s:
        """Returns the numbers of a rank's own tokens, in the order of its rows."""
        mine = placement.of_rank(rank)
        offset = (self.first - (self.lengths - self.own_lengths))[mine.document]
        return expand_ranges(offset + mine.start, mine.end - mine.start)

    def predictions_of_rank(self, placement: Placement, rank: int) -> tuple[Int64s, Int64s]:
        """Returns the numbers of the predictions that a rank's tokens make, in the order of its
        rows, and the row that makes each, `[predictions]`."""
        source, _, _, _ = self.predictions
        numbers = self.of_rank(placement, rank)
        first = np.searchsorted(source, numbers, side="left")
        counts = np.searchsorted(source, numbers, side="right") - first
        return expand_ranges(first, counts), np.repeat(np.arange(len(numbers)), counts)


def rows_of_rank(
    nodes: Nodes, placement: Placement, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens of a rank, and the position of each on its path, int64 `[rows]`, on the
    CPU."""
    mine = placement.of_rank(rank)
    none = torch.zeros(0, dtype=torch.int64)
    prefix = nodes.lengths - nodes.own_lengths
    tokens, positions = [none], [none]
    for node, start, end in zip(
        mine.document.tolist(), mine.start.tolist(), mine.end.tolist(), strict=True
    ):
        first = int(prefix[node])
        tokens.append(nodes.tokens[node][start - first : end - first])
        positions.append(torch.arange(start, end))
    return torch.cat(tokens), torch.cat(positions)


def tokens_of_rollouts(nodes: Nodes) -> Sequence[tuple[int, Int64s]]:
    """Returns the number of each rollout of the trees, and the numbers of its tokens."""
    found, node = [], 0
    for each, count in zip(nodes.documents, nodes.counts, strict=True):
        if isinstance(each, Tree):
            for rollout, end in zip(each.rollouts, each.ends, strict=True):
                path = node + np.array(each.path(end))
                numbers = expand_ranges(nodes.first[path], nodes.own_lengths[path])
                found.append((rollout, numbers))
        node += count
    return found
