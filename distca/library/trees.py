"""Documents that share prefixes: rollouts of one prompt, turns that branch, preference pairs.

A tree holds each shared token once. Its nodes are runs of tokens; a token sees its own node up to
itself, and all nodes above. So the loss, the gradients and the log-probabilities are those of the
rollouts one by one, for less work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from distca.library.documents import check_tensor
from distca.plan import BLOCK
from distca.plan.span import Int64s


@dataclass(frozen=True)
class Rollout:
    """A sequence of tokens that may share its first ones with others, such as prompt and response.

    Attributes:
        tokens: token ids, int64 `[tokens]`, on the CPU.
        weights: factor of the loss of each token, as the token before predicts it, float32
            `[tokens]`: 0 for a prompt's tokens, and an advantage or 1 for those of a response. The
            first one counts for nothing. None: all are 1.

    Raises:
        ValueError: there are no tokens, a weight is not finite, or a tensor has another shape,
            dtype or device.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("a rollout's tokens", self.tokens, torch.int64)
        if not len(self.tokens):
            raise ValueError("a rollout has no tokens: give at least one")
        if self.weights is None:
            return
        check_tensor("a rollout's weights", self.weights, torch.float32)
        if len(self.weights) != len(self.tokens):
            raise ValueError(
                f"a rollout has {len(self.tokens)} tokens, but {len(self.weights)} weights: give "
                "one weight for each token"
            )
        if not self.weights.isfinite().all():
            raise ValueError("a rollout has a weight that is not finite")


@dataclass(frozen=True)
class Tree:
    """Rollouts that share tokens, each of which is held once; `share_prefixes` makes them.

    Attributes:
        nodes: tokens of each node, int64 `[tokens]`, on the CPU. A node's path is the tokens of its
            parent's path, and then its own.
        parents: an earlier node whose tokens come before those of each, or -1: the first node alone
            has none.
        weights: factor of the loss of each node's tokens, float32 `[tokens]`: the sum of those of
            the rollouts that share it.
        rollouts: numbers of the rollouts.
        ends: node with which each of these ends.

    Raises:
        ValueError: a node has no tokens, a parent is no earlier node, or lengths differ.
    """

    nodes: tuple[torch.Tensor, ...]
    parents: tuple[int, ...]
    weights: tuple[torch.Tensor, ...]
    rollouts: tuple[int, ...]
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.nodes) == len(self.parents) == len(self.weights) > 0:
            raise ValueError("a tree needs nodes, and a parent and weights for each of them")
        for number, (tokens, parent, weights) in enumerate(
            zip(self.nodes, self.parents, self.weights, strict=True)
        ):
            check_tensor(f"the tokens of node {number}", tokens, torch.int64)
            check_tensor(f"the weights of node {number}", weights, torch.float32)
            if not 0 < len(tokens) == len(weights):
                raise ValueError(f"node {number} needs tokens, and a weight for each of them")
            if not (parent == -1 if number == 0 else 0 <= parent < number):
                raise ValueError(
                    f"node {number} has the parent {parent}: give an earlier node, or -1 for the "
                    "first node"
                )
        if len(self.rollouts) != len(self.ends):
            raise ValueError("a tree needs the node with which each of its rollouts ends")
        if not all(0 <= end < len(self.nodes) for end in self.ends):
            raise ValueError("a rollout ends with a node that is not there")

    @property
    def tokens(self) -> int:
        """Tokens of all nodes."""
        return sum(len(each) for each in self.nodes)

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the first one to a node."""
        found = [node]
        while self.parents[found[-1]] >= 0:
            found.append(self.parents[found[-1]])
        return found[::-1]


def share_prefixes(
    rollouts: Sequence[Rollout], least: int = BLOCK, first: int = 0
) -> tuple[Tree, ...]:
    """Finds the tokens that rollouts share at their beginnings, by exact comparison.

    Args:
        rollouts: rollouts in any order. Equal ones are computed once, too.
        least: fewest tokens that are worth a node of their own where rollouts part: fewer are
            computed once for each branch.
        first: number of the first rollout. Rollouts of one micro-batch have different numbers, also
            those of different ranks.

    Returns:
        Trees in the order of their first rollouts. A rollout that shares nothing is a tree of one
        node.

    Raises:
        ValueError: there are no rollouts, `least` is below 1, or `first` is negative.
    """
    if not rollouts:
        raise ValueError("there are no rollouts: give at least one")
    if least < 1:
        raise ValueError(f"least is {least}: give at least 1 token")
    if first < 0:
        raise ValueError(f"first is {first}: give 0 or more")
    tokens = [each.tokens.numpy() for each in rollouts]
    # Big-endian bytes sort as the numbers do.
    keys = [each.astype(">i8").tobytes() for each in tokens]
    order = sorted(range(len(rollouts)), key=keys.__getitem__)
    trees = [
        _tree(rollouts, tokens, group, least, common, first)
        for group, common in _split(tokens, order, 0, least)
    ]
    return tuple(sorted(trees, key=lambda tree: min(tree.rollouts)))


def _split(
    tokens: Sequence[Int64s], order: Sequence[int], depth: int, least: int
) -> list[tuple[list[int], int]]:
    """Parts sorted rollouts with the first `depth` tokens in common into those that share a node.

    Returns:
        Each group, and the tokens that it has in common in all. Rollouts that end at `depth` are
        in none.
    """
    left = [list(each) for each in (order,) if each]
    found = []
    while left:
        group = left.pop()
        while group and len(tokens[group[0]]) == depth:
            group = group[1:]
        if not group:
            continue
        common = _common(tokens[group[0]], tokens[group[-1]])
        if common - depth >= least or common == len(tokens[group[-1]]):
            found.append((group, common))
            continue
        # They part too early: by the token with which they do.
        ends = [each for each in group if len(tokens[each]) == common]
        if ends and common > depth:
            found.append((ends, common))
        goes_on = group[len(ends) :]
        after = np.array([tokens[each][common] for each in goes_on])
        edges = [0, *(np.flatnonzero(np.diff(after)) + 1).tolist(), len(goes_on)]
        left += [goes_on[a:b] for a, b in pairwise(edges)][::-1]
    return found


def _common(one: Int64s, other: Int64s) -> int:
    """Returns how many first tokens are equal."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _tree(
    rollouts: Sequence[Rollout],
    tokens: Sequence[Int64s],
    group: list[int],
    least: int,
    common: int,
    first: int,
) -> Tree:
    """Makes the tree of sorted rollouts whose first `common` tokens are one node."""
    nodes: list[torch.Tensor] = []
    parents: list[int] = []
    weights: list[torch.Tensor] = []
    ends: dict[int, int] = {}
    left = [(group, 0, common, -1)]
    while left:
        members, start, end, parent = left.pop()
        number = len(nodes)
        nodes.append(rollouts[members[0]].tokens[start:end].clone())
        parents.append(parent)
        weights.append(torch.stack([_weights(rollouts[m])[start:end] for m in members]).sum(0))
        ends |= {each: number for each in members if len(tokens[each]) == end}
        below = _split(tokens, members, end, least)
        left += [(some, end, until, number) for some, until in below[::-1]]
    found, members = (tuple(nodes), tuple(parents), tuple(weights)), sorted(ends)
    numbers = tuple(first + each for each in members)
    return Tree(*found, numbers, tuple(ends[each] for each in members))


def _weights(rollout: Rollout) -> torch.Tensor:
    if rollout.weights is None:
        return torch.ones(len(rollout.tokens))
    return rollout.weights
