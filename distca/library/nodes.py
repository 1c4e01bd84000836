"""The nodes of a micro-batch: its documents, and the nodes of its trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from distca.library.documents import IGNORED, Document
from distca.library.trees import Tree
from distca.plan import Placement
from distca.plan.paths import Paths, path_lengths
from distca.plan.span import Bools, Int64s, expand_ranges


@dataclass(frozen=True)
class Nodes:
    """A number for each document and for each node of a tree.

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
    def two_way(self) -> Bools:
        """Whether the tokens of each node see all of it, `[nodes]`."""
        found = np.zeros(len(self.parents), dtype=bool)
        for first, each in zip(self._first_nodes, self.documents, strict=True):
            for node in each.two_way if isinstance(each, Tree) else ():
                found[first + node] = True
        return found

    @cached_property
    def lengths(self) -> Int64s:
        """Tokens of each node's path, `[nodes]`."""
        return path_lengths(self.own_lengths, self.parents)

    @cached_property
    def in_plans(self) -> Paths:
        """The documents of plans, which nodes are joined to."""
        return Paths.of(self.own_lengths, self.parents, self.two_way)

    @cached_property
    def trained(self) -> tuple[Int64s, Int64s, Int64s, torch.Tensor]:
        """Trained tokens of the trees' rollouts: the number of each, its rollout, its position in
        it, and its weight, `[tokens]` each. A token that rollouts share has several."""
        numbers, rollouts, positions, weights = [], [], [], []
        for _, rollout, path, of_rollout in self._rollouts():
            lengths = self.own_lengths[path]
            count, total = len(of_rollout), int(lengths.sum())
            # Only the nodes that hold the last tokens.
            ends = np.cumsum(lengths)
            last = slice(int(np.searchsorted(ends, total - count, side="right")), None)
            tail = expand_ranges(self.first[path[last]], lengths[last])[-count or total :]
            kept = np.flatnonzero((of_rollout != 0).numpy())
            numbers.append(tail[kept])
            rollouts.append(np.full_like(kept, rollout))
            positions.append(total - count + kept)
            weights.append(of_rollout[torch.from_numpy(kept)])
        none = np.zeros(0, dtype=np.int64)
        number, rollout_of, position = (
            np.concatenate([none, *each]) for each in (numbers, rollouts, positions)
        )
        return number, rollout_of, position, torch.cat([torch.zeros(0), *weights])

    @property
    def num_trained(self) -> int:
        """Tokens that are trained: of documents and of all rollouts."""
        _, predicted, _, _ = self.predictions
        of_documents = int((predicted == int(self.own_lengths.sum())).sum())
        return of_documents + len(self.trained[0])

    @property
    def given_tokens(self) -> int:
        """Tokens of all documents and rollouts, where those that rollouts share count for each."""
        documents = sum(len(e.tokens) for e in self.documents if isinstance(e, Document))
        return documents + sum(map(len, self.paths().values()))

    def paths(self) -> dict[int, Int64s]:
        """Returns the numbers of the tokens of each rollout, by the rollout's number."""
        return {
            rollout: expand_ranges(self.first[path], self.own_lengths[path])
            for _, rollout, path, _ in self._rollouts()
        }

    def _rollouts(self) -> Iterator[tuple[Tree, int, Int64s, torch.Tensor]]:
        """Yields the trees' rollouts: tree, number, nodes of the path, and last weights."""
        node = 0
        for each, count in zip(self.documents, self.counts, strict=True):
            if isinstance(each, Tree):
                for rollout, end, weights in zip(
                    each.rollouts, each.ends, each.last_weights, strict=True
                ):
                    yield each, rollout, node + np.array(each.path(end)), weights
            node += count

    @cached_property
    def predictions(self) -> tuple[Int64s, Int64s, torch.Tensor, torch.Tensor]:
        """All that is predicted: numbers of the tokens that predict, rising, of those of trees that
        are predicted, targets and weights, `[predictions]` each. What documents predict has a
        number above all tokens.

        Raises:
            ValueError: weights of rollouts that share a token add up to what is not finite.
        """
        total = int(self.own_lengths.sum())
        sources, targets = [np.zeros(0, dtype=np.int64)], [torch.zeros(0, dtype=torch.int64)]
        for node, each in zip(self._first_nodes, self.documents, strict=True):
            if isinstance(each, Document):
                found = np.flatnonzero((each.next_tokens != IGNORED).numpy())
                sources.append(self.first[node] + found)
                targets.append(each.next_tokens[torch.from_numpy(found)])
        of_documents = np.concatenate(sources)
        number, _, _, weight = self.trained
        predicted, of = np.unique(number, return_inverse=True)
        exact = np.bincount(of, weight.double().numpy(), len(predicted))
        with np.errstate(over="ignore"):
            summed = exact.astype(np.float32)
        if not np.isfinite(summed).all():
            raise ValueError("weights of rollouts that share a token add up to infinity")
        # The token before is in the same node, or the last one of the parent.
        node_of = np.searchsorted(self.first, predicted, side="right") - 1
        opens = predicted == self.first[node_of]
        parent = self.parents[node_of]
        before = np.where(opens, (self.first + self.own_lengths - 1)[parent], predicted - 1)
        all_tokens = torch.cat(self.tokens)
        source = np.concatenate([of_documents, before])
        order = np.argsort(source, kind="stable")
        by = torch.from_numpy(order)
        return (
            source[order],
            np.concatenate([np.full_like(of_documents, total), predicted])[order],
            torch.cat([*targets, all_tokens[torch.from_numpy(predicted)]])[by],
            torch.cat([torch.ones(len(of_documents)), torch.from_numpy(summed)])[by],
        )

    @property
    def _first_nodes(self) -> list[int]:
        return [0, *accumulate(self.counts)][:-1]

    def of_rank(self, placement: Placement, rank: int) -> Int64s:
        """Returns the numbers of a rank's own tokens, in the order of its rows."""
        mine, paths = placement.of_rank(rank), self.in_plans
        offset = (self.first[paths.first_node] - paths.prefix)[mine.document]
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
    numbers = torch.from_numpy(nodes.of_rank(placement, rank))
    positions = expand_ranges(mine.start, mine.end - mine.start)
    return torch.cat(nodes.tokens)[numbers], torch.from_numpy(positions)
