"""Documents that share prefixes: rollouts of one prompt, turns that branch, preference pairs.

A tree holds each shared token once. Its nodes are runs of tokens; a token sees its own node up to
itself, and all nodes above. So the loss, the gradients and the log-probabilities are those of the
rollouts one by one, for less work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from distca.library.documents import check_integer, check_tokens, check_weights
from distca.plan.paths import LEAST_SHARED
from distca.plan.span import Int64s

_MOST = 2**63 - 1
"""The largest number that a rollout may have."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """A sequence of tokens that may share its first ones with others, such as prompt and response.

    Attributes:
        tokens: token ids, int64 `[tokens]`, on the CPU.
        weights: factor of the loss of each token, as the token before predicts it, float32
            `[tokens]`: 0 for a prompt's tokens, which are not predicted then, and 1 for those of a
            response. The first one counts for nothing. None: all are 1. Multiply losses by
            advantages yourself, as `examples/rollouts.py` does: a token with an advantage of 0 as
            its weight has no log-probability and is missing in `Batch.num_trained`.

    Raises:
        ValueError: there are no tokens, one is negative, a weight is not finite, weights require
            gradients, or a tensor has another shape, dtype or device.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_tokens("a rollout", self.tokens)
        if self.weights is None:
            return
        check_weights("a rollout", self.weights)
        if len(self.weights) != len(self.tokens):
            raise ValueError(
                f"a rollout has {len(self.tokens)} tokens, but {len(self.weights)} weights: give "
                "one weight for each token"
            )

    def __reduce__(self) -> tuple[object, ...]:
        weights = None if self.weights is None else self.weights.numpy()
        return _rollout, (self.tokens.numpy(), weights)


def _rollout(tokens: Int64s, weights: NDArray[np.float32] | None) -> Rollout:
    """Makes a rollout of arrays: tensors would take a file each on the way between processes."""
    of = None if weights is None else torch.from_numpy(weights)
    return Rollout(torch.from_numpy(tokens), of)


@dataclass(frozen=True, eq=False)
class Tree:
    """Rollouts that share tokens. Each token is held once. `share_prefixes` makes trees.

    Attributes:
        nodes: tokens of each node, int64 `[tokens]`, on the CPU. A node's path is the tokens of its
            parent's path, and then its own.
        parents: an earlier node whose tokens come before those of each, or -1: the first node alone
            has none.
        rollouts: numbers of the rollouts, 0 or more.
        ends: node with which each of these ends.
        last_weights: weights of the last tokens of each rollout, float32; those before have 0.
        two_way: nodes whose tokens see all of the node, and not only what is before them: an image,
            the prompt of a prefix language model, an encoder's document. Of their tokens only the
            first may be trained, since the others are seen by those that predict them.

    Raises:
        ValueError: a node has no tokens or a negative one, a parent is no earlier node, lengths or
            numbers are wrong, a number is given twice, a weight is not finite, or a token of a
            two-way node is trained.
    """

    nodes: tuple[torch.Tensor, ...]
    parents: tuple[int, ...]
    rollouts: tuple[int, ...]
    ends: tuple[int, ...]
    last_weights: tuple[torch.Tensor, ...]
    two_way: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            given = getattr(self, name)
            if not isinstance(given, Sequence) or isinstance(given, str | bytes):
                raise ValueError(f"a tree's {name} are a {type(given).__name__}: give a tuple")
            object.__setattr__(self, name, tuple(given))
        if not len(self.nodes) == len(self.parents) > 0:
            raise ValueError("a tree needs nodes, and a parent for each of them")
        for number, (tokens, parent) in enumerate(zip(self.nodes, self.parents, strict=True)):
            check_tokens(f"node {number}", tokens)
            check_integer(f"the parent of node {number}", parent, -1)
            if not (parent == -1 if number == 0 else 0 <= parent < number):
                raise ValueError(
                    f"node {number} has the parent {parent}: give an earlier node, or -1 for the "
                    "first node"
                )
        if not len(self.rollouts) == len(self.ends) == len(self.last_weights):
            raise ValueError("a tree needs the last node and the weights of each of its rollouts")
        for rollout, end, weights in zip(self.rollouts, self.ends, self.last_weights, strict=True):
            check_integer("a rollout's number", rollout, 0, _MOST)
            check_integer(f"the last node of rollout {rollout}", end, 0)
            if end >= len(self.nodes):
                raise ValueError(f"rollout {rollout} ends with node {end}, which is not there")
            check_weights(f"rollout {rollout}", weights)
            if len(weights) >= sum(len(self.nodes[each]) for each in self.path(end)):
                raise ValueError(f"rollout {rollout} has a weight for its first token, or more")
        self._check_two_way()
        for what, numbers in (("rollout", self.rollouts), ("two-way node", self.two_way)):
            twice = [each for each, count in Counter(numbers).items() if count > 1]
            if twice:
                raise ValueError(f"a tree has {what} {twice[0]} twice: give each number once")

    def _check_two_way(self) -> None:
        for node in self.two_way:
            check_integer("a two-way node", node, 0)
            if node >= len(self.nodes):
                raise ValueError(f"node {node} is two-way, but is not there")
        for rollout, end, weights in zip(self.rollouts, self.ends, self.last_weights, strict=True):
            left = weights
            for node in self.path(end)[::-1] if self.two_way else ():
                mine, left = left[-len(self.nodes[node]) :], left[: -len(self.nodes[node])]
                inside = mine[1:] if len(mine) == len(self.nodes[node]) else mine
                if node in self.two_way and bool(inside.any()):
                    raise ValueError(
                        f"rollout {rollout} trains tokens of node {node}, which see each other: "
                        "give weights of 0, except for the first one"
                    )

    def __reduce__(self) -> tuple[object, ...]:
        flat = (
            torch.cat(self.nodes).numpy(),
            torch.cat([torch.zeros(0), *self.last_weights]).numpy(),
        )
        lengths = [len(each) for each in self.nodes], [len(each) for each in self.last_weights]
        of_nodes = self.parents, self.rollouts, self.ends, self.two_way
        return _tree_of, (*flat, *lengths, *of_nodes)

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


def _tree_of(
    tokens: Int64s,
    weights: NDArray[np.float32],
    token_counts: list[int],
    weight_counts: list[int],
    parents: tuple[int, ...],
    rollouts: tuple[int, ...],
    ends: tuple[int, ...],
    two_way: tuple[int, ...],
) -> Tree:
    """Makes a tree of arrays, as `_rollout` does."""
    nodes = tuple(torch.split(torch.from_numpy(tokens), token_counts))
    of_rollouts = tuple(torch.split(torch.from_numpy(weights), weight_counts))
    return Tree(nodes, parents, rollouts, ends, of_rollouts, two_way)


def share_prefixes(
    rollouts: Sequence[Rollout], least: int = LEAST_SHARED, first: int = 0
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
        node. Of no rollouts there are no trees.

    Raises:
        ValueError: something else than a list of `Rollout` is given, `least` is below 1, or `first`
            is negative.
    """
    if not isinstance(rollouts, Iterable):
        raise ValueError(f"a {type(rollouts).__name__} is given: give a list of rollouts")
    rollouts = tuple(rollouts)
    for each in rollouts:
        if not isinstance(each, Rollout):
            raise ValueError(f"a {type(each).__name__} is no rollout: give Rollout(tokens)")
    check_integer("least", least, 1)
    check_integer("first", first, 0, _MOST - len(rollouts))
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
        common = depth + _common(tokens[group[0]][depth:], tokens[group[-1]][depth:])
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
    ends: dict[int, int] = {}
    left = [(group, 0, common, -1)]
    while left:
        members, start, end, parent = left.pop()
        number = len(nodes)
        nodes.append(rollouts[members[0]].tokens[start:end].clone())
        parents.append(parent)
        ends |= {each: number for each in members if len(tokens[each]) == end}
        # The one with most rollouts follows its parent, and so goes on with its document in plans.
        below = sorted(_split(tokens, members, end, least), key=lambda each: -len(each[0]))
        left += [(some, end, until, number) for some, until in below[::-1]]
    members = sorted(ends)
    return Tree(
        tuple(nodes),
        tuple(parents),
        tuple(first + each for each in members),
        tuple(ends[each] for each in members),
        tuple(_last_weights(rollouts[each]) for each in members),
    )


def _last_weights(rollout: Rollout) -> torch.Tensor:
    """Returns the weights from the first one on that is not 0; the first token has none."""
    if rollout.weights is None:
        return torch.ones(len(rollout.tokens) - 1)
    some = torch.nonzero(rollout.weights[1:])
    return rollout.weights[1 + int(some[0]) :].clone() if len(some) else torch.zeros(0)
