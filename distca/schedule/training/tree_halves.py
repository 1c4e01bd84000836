"""Nano-batches of trees: whole trees in ping or pong, and at most one that is cut in two.

A tree is cut where its tokens lie node by node: ping has the first ones, pong the rest. Pong's
tokens see ping's tokens of the path to the cut, the *spine*. These are a cached prefix of pong's
first document, from which the other branches of the cut tree branch off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan import LayerMasks, Placement, Plan
from distca.plan.span import Floats, Int64s, expand_ranges
from distca.schedule.tiles.scheduler import TilesScheduler
from distca.schedule.training.nano_batches import NanoPlan, split_in_two
from distca.schedule.training.planned_batch import Documents
from distca.schedule.training.trees import DocumentTrees, plan_trees


@dataclass(frozen=True)
class _Half:
    """The nodes of a nano-batch.

    Attributes:
        trees: nodes. Those of a spine are there, too.
        places: what is added to a position on a node's path to get its place in the stream, int64
            `[nodes]`.
    """

    trees: DocumentTrees
    places: Int64s

    def documents(self) -> Documents:
        """The documents of the nano-batch's plan."""
        paths = self.trees.paths
        return Documents(paths.lengths, self.places[paths.first_node])


def plan_tree_halves(
    documents: Documents,
    loads: Floats,
    scheduler: TilesScheduler,
    masks: LayerMasks,
    ranks: int,
) -> tuple[tuple[Documents, ...], list[tuple[NanoPlan, ...]]]:
    """Plans a micro-batch whose documents share tokens, as two nano-batches.

    Args:
        documents: documents of the micro-batch.
        loads: load of each, `[documents]`.
        scheduler: scheduler over the ranks of a stage.
        masks: masks of the layers.
        ranks: ranks of a stage. Twice as many divide the tokens.

    Returns:
        The documents of ping and pong, and the plans of both with each mask.
    """
    parts = split_in_two(documents.lengths, loads)
    cut = int(parts[1].start[0]) if parts[1].start[0] else None
    crossing = int(parts[1].document[0])
    whole = [
        _whole(documents, each.document[each.lengths == documents.lengths[each.document]])
        for each in parts
    ]
    if cut is None:
        planned = [plan_trees(half.trees, scheduler, masks, ranks) for half in whole]
        plans = [tuple(map(NanoPlan, of_mask)) for of_mask in zip(*planned, strict=True)]
        return tuple(half.documents() for half in whole), plans
    before, after, spine = _cut(_whole(documents, np.array([crossing])), cut)
    ping, pong = _joined([whole[0], before]), _joined([after, whole[1]])
    of_ping = plan_trees(ping.trees, scheduler, masks, ranks)
    first_node = len(whole[0].trees.own_lengths)
    borrowed = _pieces(ping.trees, of_ping[0], first_node + spine)
    cached = replace(borrowed, document=np.zeros_like(borrowed.document))
    of_pong = plan_trees(pong.trees, scheduler, masks, ranks, cached)
    plans = [
        (NanoPlan(first), NanoPlan(second, from_ping=borrowed))
        for first, second in zip(of_ping, of_pong, strict=True)
    ]
    return (ping.documents(), pong.documents()), plans


def _whole(documents: Documents, numbers: Int64s) -> _Half:
    """Returns the nodes of some documents."""
    some = documents.select(numbers)
    assert some.trees is not None
    trees = some.trees
    return _Half(trees, some.starts[trees.document] + trees.offsets - trees.prefix)


def _joined(halves: Sequence[_Half]) -> _Half:
    return _Half(
        DocumentTrees.joined([half.trees for half in halves]),
        np.concatenate([half.places for half in halves]),
    )


def _cut(tree: _Half, cut: int) -> tuple[_Half, _Half, Int64s]:
    """Cuts a tree behind some tokens.

    Args:
        tree: the tree.
        cut: how many of its tokens come before.

    Returns:
        The tokens before, those behind it with the spine before them, and the nodes of the spine
        among those before.
    """
    own, parents, places = tree.trees.own_lengths, tree.trees.parents, tree.places
    ends = np.cumsum(own)
    node = int(np.searchsorted(ends, cut, side="right"))
    within = cut - int(ends[node] - own[node])
    if within:
        # The node becomes two.
        own = np.insert(own, node, within)
        own[node + 1] -= within
        parents = np.insert(np.where(parents >= node, parents + 1, parents), node, parents[node])
        places = np.insert(places, node, places[node])
        node += 1
        parents[node] = node - 1
    spine: list[int] = []
    above = int(parents[node])
    while above >= 0:
        spine.insert(0, above)
        above = int(parents[above])
    numbers = np.full(len(own), -1)
    numbers[spine] = np.arange(len(spine))
    numbers[node:] = np.arange(len(spine), len(spine) + len(own) - node)
    kept = [*spine, *range(node, len(own))]
    of_kept = np.where(parents[kept] < 0, -1, numbers[parents[kept]])
    # Tokens of the spine are read by ping.
    of_pong = places[kept]
    of_pong[: len(spine)] = places[node]
    one = np.ones(1, dtype=np.int64)
    before = DocumentTrees(node * one, own[:node], parents[:node])
    behind = DocumentTrees(len(kept) * one, own[kept], of_kept)
    return _Half(before, places[:node]), _Half(behind, of_pong), np.array(spine)


def _pieces(trees: DocumentTrees, plan: Plan, nodes: Int64s) -> Placement:
    """Returns who owns the tokens of some nodes in a plan, in the order of the nodes.

    Args:
        trees: nodes of the plan.
        plan: plan of their paths.
        nodes: numbers of nodes.
    """
    p = plan.placement
    document = np.searchsorted(trees.paths.first_node, nodes, side="right") - 1
    found = []
    for of, start, end in zip(document, trees.prefix[nodes], trees.lengths[nodes], strict=True):
        low, high = np.maximum(p.start, start), np.minimum(p.end, end)
        there = np.flatnonzero((p.document == of) & (high > low))
        there = there[np.argsort(low[there])]
        found.append(replace(p.select(there), start=low[there], end=high[there]))
    return Placement.concatenate(found)


def borrowed_rows(ping: Plan, borrowed: Placement, rank: int) -> Int64s:
    """Returns a rank's rows of ping that pong borrows, in the order in which pong has them.

    Args:
        ping: plan of ping.
        borrowed: see `NanoPlan.from_ping`.
        rank: number of the rank.
    """
    mine = borrowed.of_rank(rank)
    first = ping.owners(ping.document_offsets[mine.document] + mine.start).row
    return expand_ranges(first, mine.end - mine.start)
