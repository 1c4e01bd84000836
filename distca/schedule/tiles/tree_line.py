"""Placement of trees: documents that share tokens, whose nodes belong together.

A node needs the keys of the nodes above it. So the tokens of a tree are put on a line, depth first,
and ranks own pieces of that line.

* *Packing* (`packing.py`) takes the lines of trees for documents: small trees stay whole.
* *Chunks*: the lines of all trees, one after the other, are cut in chunks of equally many tokens.
  The tokens of a chunk see about the same keys. Each rank gets equally many chunks, the heaviest
  chunk first to the rank with least load, so that light chunks (of prompts) make up for heavy ones
  (of answers). More chunks a rank are balanced better, and need keys of more nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from distca.plan import Mask, Placement
from distca.plan.span import Floats, Int64s, cut_at, order_by


@dataclass(frozen=True)
class TreeLine:
    """Nodes of trees, depth first: a node before its children, and these in their order.

    Attributes:
        order: number of each node on the line, int64 `[nodes]`.
        own: own tokens of each of these, likewise.
        prefix: tokens of its path that are its parent's, likewise.
        tree: number of its tree, rising, likewise.
        shift: see `Plan.query_shift`, likewise.
    """

    order: Int64s
    own: Int64s
    prefix: Int64s
    tree: Int64s
    shift: Int64s

    @staticmethod
    def of(
        own_lengths: Int64s, prefix: Int64s, parents: Int64s, shift: Int64s | None = None
    ) -> TreeLine:
        """Puts nodes on a line.

        Args:
            own_lengths: tokens of each node that are not its parent's, int64 `[nodes]`.
            prefix: tokens of each node's path that are its parent's, likewise.
            parents: an earlier node, or -1, likewise.
            shift: see `Plan.query_shift`.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            children.setdefault(parent, []).append(node)
        found, left = [], children.get(-1, [])[::-1]
        while left:
            node = left.pop()
            found.append(node)
            left += children.get(node, [])[::-1]
        order = np.array(found, dtype=np.int64)
        tree = np.cumsum(parents[order] < 0) - 1
        shift = np.zeros_like(order) if shift is None else shift[order]
        return TreeLine(order, own_lengths[order], prefix[order], tree, shift)

    @property
    def ends(self) -> Int64s:
        """End of each node on the line, `[nodes]`."""
        return np.cumsum(self.own)

    def of_trees(self, values: Int64s | Floats) -> Floats:
        """Adds up a quantity of each node by tree, `[trees]`."""
        return np.bincount(self.tree, weights=values[self.order])

    def of_nodes(self, placement: Placement) -> Placement:
        """Returns which tokens of paths are whose.

        Args:
            placement: pieces of trees, as documents.
        """
        tokens = self.of_trees(self._by_number(self.own))
        first = (np.cumsum(tokens) - tokens).astype(np.int64)[placement.document]
        order = order_by(first + placement.start)
        return self._cut((first + placement.end)[order], placement.rank[order], placement)

    def chunks(self, capacities: Int64s, speeds: Floats, mask: Mask, number: int) -> Placement:
        """Places the trees in chunks.

        Args:
            capacities: tokens that each rank owns, int64 `[ranks]`; their sum is the line's.
            speeds: speed of each rank, `[ranks]`.
            mask: attention mask, whose visible pairs are loads.
            number: chunks of each rank.
        """
        ranks = len(capacities)
        edges = np.linspace(0, self.own.sum(), ranks * number + 1).round().astype(np.int64)
        rank = _deal(np.diff(self._pairs_before(edges, mask)), speeds, number)
        # A rank's chunks are as long together as what it owns.
        turn = np.empty_like(rank)
        turn[order_by(rank)] = np.tile(np.arange(number), ranks)
        of_rank = capacities[rank]
        sizes = (turn + 1) * of_rank // number - turn * of_rank // number
        none = np.zeros(0, dtype=np.int64)
        return self._cut(np.cumsum(sizes), rank, Placement(none, none, none, none, ranks))

    def _pairs_before(self, edges: Int64s, mask: Mask) -> Floats:
        """Returns the visible pairs of the tokens before places on the line, `[edges]`."""
        zeros, end, shift = np.zeros_like(self.own), self.prefix + self.own, self.shift
        whole = np.cumsum(mask.pairs(self.prefix + shift, end + shift, zeros, end))
        node = np.minimum(np.searchsorted(self.ends, edges, side="right"), len(self.own) - 1)
        first, zeros = (self.prefix + shift)[node], np.zeros_like(node)
        until = first + edges - (self.ends - self.own)[node]
        before = np.concatenate([zeros[:1], whole])[node]
        return (before + mask.pairs(first, until, zeros, end[node])).astype(np.float64)

    def _cut(self, cuts: Int64s, rank: Int64s, like: Placement) -> Placement:
        """Places the line's pieces that end at `cuts`: piece `n` on `rank[n]`."""
        piece, start, end = cut_at(np.concatenate([[0], cuts[:-1]]), cuts, self.ends)
        node = np.searchsorted(self.ends, start, side="right")
        shift = (self.prefix - (self.ends - self.own))[node]
        found = replace(
            like, document=self.order[node], start=start + shift, end=end + shift, rank=rank[piece]
        )
        return found.joined()

    def _by_number(self, values: Int64s) -> Int64s:
        """Returns values of nodes on the line by the nodes' numbers."""
        found = np.empty_like(values)
        found[self.order] = values
        return found


def _deal(loads: Floats, speeds: Floats, number: int) -> Int64s:
    """Deals chunks out, the heaviest first to the rank with least load of those that lack some.

    Args:
        loads: load of each chunk, `[ranks * number]`.
        speeds: speed of each rank, `[ranks]`.
        number: chunks of each rank.

    Returns:
        Rank of each chunk, int64.
    """
    rank = np.empty(len(loads), dtype=np.int64)
    lacking = [(0.0, 0, each) for each in range(len(speeds))]
    for chunk in np.argsort(-loads, kind="stable").tolist():
        time, count, to = heapq.heappop(lacking)
        rank[chunk] = to
        if count + 1 < number:
            time += float(loads[chunk] / speeds[to])
            heapq.heappush(lacking, (time, count + 1, to))
    return rank
