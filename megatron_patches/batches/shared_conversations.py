"""Conversations that hold the tokens they share once: `--distca-share-prefixes`.

Conversations whose first tokens are equal become a *tree*, which is one document of the token
stream. Its tokens lie node by node, a node before its children, and the first child right behind.
The stream then needs no other rules: the label of a token is the next one of the document.

Where conversations part, each predicts another token from the last one that they share. A token has
one label alone, so each child begins with a copy of that last token, and the node above ends before
it. The token before the copies predicts it once for all.

A token that several conversations share and train counts once for each: their weights add up. The
loss is then that of the conversations one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distca.documents.conversations import Conversations
from distca.documents.document_list import TokenSource
from distca.library import Rollout, Tree, share_prefixes
from distca.plan.paths import LEAST_SHARED, Paths
from distca.plan.span import Floats, Int64s


@dataclass(frozen=True)
class _FlatTree:
    """A tree as a document.

    Attributes:
        first: number of the tree's first conversation.
        tokens: tokens of the document, int32 `[tokens]`.
        weights: weight of each token, as the token before it in the document predicts it, float64
            `[tokens]`.
        counts: conversations that train it, likewise, int32 `[tokens]`.
        own_lengths: tokens of each node, int64 `[nodes]`.
        parents: parent of each node, or -1, int64 `[nodes]`.
    """

    first: int
    tokens: np.ndarray
    weights: Floats
    counts: np.ndarray
    own_lengths: Int64s
    parents: Int64s


class SharedConversations(TokenSource):
    """The conversations of a file as trees, in memory.

    Args:
        conversations: conversations of the file.
        most: most tokens of a tree, those of a pack. Conversations that share tokens and have no
            room in one tree are several trees; one that is longer itself stays as it is.
        least: fewest tokens that are worth a node of their own.
    """

    def __init__(self, conversations: Conversations, most: int, least: int = LEAST_SHARED) -> None:
        self._conversations = conversations
        rollouts = [
            Rollout(
                torch.from_numpy(conversations.read(number, 0, length)),
                torch.from_numpy(conversations.loss_weights(number, 0, length)).float(),
            )
            for number, length in enumerate(conversations.lengths.tolist())
        ]
        self._trees: list[_FlatTree] = []
        for tree in share_prefixes(rollouts, least):
            for group in _groups(tree, most):
                some = share_prefixes([rollouts[number] for number in group], least)
                self._trees += [flat for each in some for flat in _flatten(each, group)]
        self._trees.sort(key=lambda each: each.first)
        self._lengths = np.array([len(each.tokens) for each in self._trees], dtype=np.int64)

    @property
    def lengths(self) -> Int64s:
        return self._lengths

    @property
    def shares_tokens(self) -> bool:
        return True

    @property
    def saved(self) -> float:
        """How many times as many tokens the conversations have one by one."""
        return float(self._conversations.lengths.sum()) / float(self._lengths.sum())

    def read(self, document: int, start: int, end: int) -> Int64s:
        return self._trees[document].tokens[start:end].astype(np.int64)

    def loss_weights(self, document: int, start: int, end: int) -> Floats:
        return self._trees[document].weights[start:end]

    def target_counts(self, document: int, start: int, end: int) -> Int64s:
        return self._trees[document].counts[start:end].astype(np.int64)

    def tree(self, document: int) -> tuple[Int64s, Int64s]:
        """See `TokenSource.tree`."""
        return self._trees[document].own_lengths, self._trees[document].parents

    @property
    def largest(self) -> int:
        """The document whose branches have most tokens with those that they share."""
        tokens = [int(Paths.of(e.own_lengths, e.parents).lengths.sum()) for e in self._trees]
        return int(np.argmax(tokens))

    def place(self, document: int) -> str:
        return self._conversations.place(self._trees[document].first)


def _groups(tree: Tree, most: int) -> list[list[int]]:
    """Groups the rollouts of a tree so that each group's tree has room in some tokens.

    Rollouts that lie side by side in the tree share most.
    """
    if _flat_length(tree) <= most:
        return [list(tree.rollouts)]
    groups: list[list[int]] = []
    held: set[int] = set()
    tokens = 0
    for end, rollout in sorted(zip(tree.ends, tree.rollouts, strict=True)):
        path = tree.path(end)
        # Each node may begin with a copy.
        added = sum(len(tree.nodes[node]) + 1 for node in path if node not in held)
        if not groups or tokens + added > most:
            groups.append([])
            held, tokens = set(), 0
            added = sum(len(tree.nodes[node]) + 1 for node in path)
        groups[-1].append(rollout)
        held.update(path)
        tokens += added
    return [sorted(group) for group in groups]


def _flat_length(tree: Tree) -> int:
    """Returns the tokens of a tree as a document, with copies."""
    parents = [parent for parent in tree.parents if parent >= 0]
    return tree.tokens + len(parents) - len(set(parents))


def _flatten(tree: Tree, numbers: Sequence[int]) -> list[_FlatTree]:
    """Lays the nodes of a tree one after the other.

    Args:
        tree: tree of some conversations.
        numbers: number of each of these, by its number in the tree.

    Returns:
        One document; several if the tree's first node has one token alone, which each child has a
        copy of.
    """
    weights = _sums(tree, [each.double().numpy() for each in tree.last_weights])
    counts = _sums(tree, [(each != 0).numpy() for each in tree.last_weights])
    has_children = {parent for parent in tree.parents if parent >= 0}
    tokens = [each.numpy() for each in tree.nodes]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    heads = [tokens[parent][-1:] if parent >= 0 else tokens[0][:0] for parent in tree.parents]
    alone = 0 in has_children and len(tokens[0]) == 1
    found = []
    for root in children[0] if alone else [0]:
        own: list[np.ndarray] = []
        own_weights: list[Floats] = []
        own_counts: list[Floats] = []
        parents: list[int] = []
        # In the order of the document: a node, then all below its first child, and so on.
        left = [(root, -1)]
        while left:
            node, parent = left.pop()
            before = tree.parents[node]
            # The first child follows the node above, which predicts what all children copy.
            is_first = before >= 0 and node == children[before][0] and not (alone and before == 0)
            mine = np.concatenate([heads[node], tokens[node]])
            keep = len(mine) - (node in has_children)
            number = len(own)
            own.append(mine[:keep])
            for of_nodes, own_column in ((weights, own_weights), (counts, own_counts)):
                head = of_nodes[before][-1:] * is_first if before >= 0 else of_nodes[0][:0]
                own_column.append(np.concatenate([head, of_nodes[node]])[:keep])
            parents.append(parent)
            left += [(child, number) for child in children.get(node, ())[::-1]]
        found.append(
            _FlatTree(
                numbers[min(tree.rollouts)],
                np.concatenate(own).astype(np.int32),
                np.concatenate(own_weights),
                np.concatenate(own_counts).astype(np.int32),
                np.array([len(each) for each in own], dtype=np.int64),
                np.array(parents, dtype=np.int64),
            )
        )
    return found


def _sums(tree: Tree, of_last: Sequence[np.ndarray]) -> list[Floats]:
    """Adds up a quantity of each node's tokens over the conversations, `[tokens]` of each node.

    Args:
        tree: tree of the conversations.
        of_last: quantity of the last tokens of each conversation, as `Tree.last_weights` has them.
    """
    found = [np.zeros(len(each)) for each in tree.nodes]
    for end, rest in zip(tree.ends, of_last, strict=True):
        for node in reversed(tree.path(end)):
            if not len(rest):
                break
            mine = rest[-len(found[node]) :]
            found[node][len(found[node]) - len(mine) :] += mine
            rest = rest[: len(rest) - len(mine)]
    return found
