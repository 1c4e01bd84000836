"""Balanced placement: documents packed so that ranks start with nearly equal loads.

**Why.** Only the number of tokens binds a rank; the documents that these belong to can be chosen.
A query that its owner computes does not travel, so load that is moved by placing tokens costs the
keys alone, and no bytes at all if documents stay whole; moved by tasks it costs queries, outputs
and keys. Also, a document that is placed in turn has one hot owner, which sends the first keys to
all others; if it is spread over several ranks, each sends a part.

**Mirrored slices.** Row `x` of a document of `L` tokens sees `x + 1` keys, row `L - 1 - x` sees
`L - x`: a slice of `t` tokens that is made of mirror images, a head and a tail, has `t * (L + 1)/2`
pairs wherever it is. So a document can be spread in slices of any sizes, with loads in proportion
to their tokens (this is the head-tail or zigzag sharding of context parallelism, with unequal
shares). A rank with a slice receives nearly all keys of the document, `L` rows.

**Packing.** Short documents are *filler*: they have about the load `rho` a token, and fill ranks up
at the end. Another document counts by its *excess*, its load less `rho * L`; a rank has room for
its tokens, and the *spare* `(1 + slack) * target - rho * room`. This is one-dimensional bin packing
with a second bound:

1. documents in the order of their excess, the largest first: whole onto the rank with the least
   spare that suffices, and room for its tokens (best fit: it leaves large spares for others);
2. if there is none, spread in mirrored slices over as few ranks as can take it, those that can take
   most first, within one node if there are nodes and one of them suffices; each rank is filled
   before the next, so that few ranks hold slices of two documents;
3. filler: documents in the order of their length, dealt out to the ranks by the load that a token
   of their room should bring, and cut where a rank is full. These cuts go through short documents
   and cost few bytes.

All but step 2 is exact in tokens, and heuristic in load: moving tiles (`moves.py`) balances the
rest. `O(D log D + P n)` for `D` documents, `n` ranks and `P` documents that are no filler (at most
32 times as many as ranks): what is done for each rank is a few operations on arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from distca.plan import Placement
from distca.plan.span import Floats, Int64s, distinct

_Values = TypeVar("_Values", Int64s, Floats)

_SHORT, _LIGHT, _NOT_LONG = 32, 8, 4
"""Divisors that define filler: documents of at most 1/32 of a rank's mean tokens, or of at most 1/8
of its mean load and 1/4 of its mean tokens."""
_STRATA = 12
"""Parts in which filler is dealt out, the densest first."""
_BLOCKS_IN_SLICE = 8
"""Mean number of blocks in a slice from which slices are cut on blocks."""
_MOST_MEMBERS = 2
"""Most ranks that a document is spread over, as a multiple of those it would need if empty."""
_LEAST_DENSITY = 1e-6
"""Least excess a token that a spread document counts with, as a part of the spare a token."""


@dataclass(frozen=True)
class Packing:
    """Bounds and parameters of a packing.

    Attributes:
        capacities: tokens that each rank owns, int64 `[ranks]`; their sum is the documents'.
        targets: load that each rank should have, `[ranks]`.
        base_share: part of all tokens, in the shortest documents, whose load a token is taken as
            that of filler, `rho`.
        slack: part of its target by which documents may load a rank above it.
        overfill: further part of the target by which a document may exceed it to stay whole.
        ranks_per_node: ranks of a node; ranks `[0, ranks_per_node)` share the first one.
        block: tokens in a kernel's block; slices of long documents are cut on its multiples.
    """

    capacities: Int64s
    targets: Floats
    base_share: float
    slack: float
    overfill: float
    ranks_per_node: int
    block: int


def place_balanced(lengths: Int64s, loads: Floats, packing: Packing) -> Placement:
    """Places documents so that every rank's room is full and its load is near its target.

    Args:
        lengths: tokens of each document, int64 `[documents]`.
        loads: load of each document, in the unit of the targets, `[documents]`.
        packing: bounds and parameters.
    """
    return _Packer(lengths, loads, packing).place()


class _Packer:
    """State of one packing."""

    def __init__(self, lengths: Int64s, loads: Floats, packing: Packing) -> None:
        self._lengths, self._loads, self._packing = lengths, loads, packing
        self._filler, self._others = _split_filler(lengths, loads, packing)
        self._density = _base_density(lengths, loads, packing.base_share)
        self._room = packing.capacities.copy()
        self._spare = packing.targets * (1 + packing.slack) - self._density * packing.capacities
        self._whole_spare = max(float(self._spare.max()), 1e-9)
        self._rows: list[tuple[int, int, int, int]] = []

    def place(self) -> Placement:
        excess = self._loads - self._density * self._lengths
        others = self._others[np.lexsort((self._others, -excess[self._others]))]
        columns = (others, self._lengths[others], excess[others])
        for document, length, wanted in zip(*(column.tolist() for column in columns), strict=True):
            rank = self._emptiest(length, wanted)
            if rank is None:
                self._spread(document, length, wanted)
            else:
                self._rows.append((document, 0, length, rank))
                self._take(rank, length, wanted)
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 4)
        document, start, end, rank = np.concatenate([table, self._fill()]).T
        placed = Placement(document, start, end, rank, len(self._packing.capacities))
        # Two pieces of a document may touch on a rank, which is no place to cut its tasks.
        return placed.joined()

    def _emptiest(self, length: int, wanted: float) -> int | None:
        """Finds the rank with most spare of those with room; None if its load got too high."""
        able = np.flatnonzero(self._room >= length)
        if not len(able):
            return None
        spare = self._spare[able]
        # Of ranks with equal spare the last one.
        rank = int(able[len(able) - 1 - np.argmax(spare[::-1])])
        much = wanted - self._spare[rank] > self._packing.overfill * self._packing.targets[rank]
        return None if much else rank

    def _take(self, rank: int, tokens: int, load: float) -> None:
        self._room[rank] -= tokens
        self._spare[rank] -= load

    def _spread(self, document: int, length: int, excess: float) -> None:
        """Places mirrored slices of a document on the ranks that can take most of it."""
        # A token with nearly no excess (or less) must still count beside the spare of ranks.
        least = _LEAST_DENSITY * float(np.abs(self._spare).max()) / max(int(self._room.max()), 1)
        density = max(excess / length, least, 1e-9)
        takes = np.minimum(self._room, np.maximum(self._spare, 0) / density)
        fewest = math.ceil(excess / self._whole_spare)
        most = max(_MOST_MEMBERS * fewest, 2)
        order = _most_first(takes, most, self._packing.ranks_per_node)
        enough = int(np.searchsorted(np.cumsum(takes[order]), length - 0.5)) + 1
        members = order[: min(enough, most)]
        if enough > min(most, len(order)):
            # The ranks can't take all: each takes more, so that the least spare stays largest.
            if self._room[members].sum() < length:
                roomy = np.argsort(-self._room, kind="stable")
                members = roomy[: 1 + np.searchsorted(np.cumsum(self._room[roomy]), length)]
            room = self._room[members]
            takes[members] = _water_fill(self._spare[members], room, density, length)
        capacities = self._room[members]
        wanted = np.minimum(np.ceil(takes[members]).astype(np.int64), capacities)
        wanted = _steps(np.minimum(np.cumsum(wanted), length))
        assert int(wanted.sum()) == length, f"document {document} fits no ranks"
        heads, tails = _slice_edges(wanted, capacities, self._packing.block)
        tokens = _slice_tokens(heads, tails, length).tolist()
        head, tail_end = 0, length
        for rank, middle, tail, count in zip(
            members.tolist(), heads.tolist(), tails.tolist(), tokens, strict=True
        ):
            self._rows += [
                (document, start, end, rank)
                for start, end in ((head, middle), (tail, tail_end))
                if end > start
            ]
            self._take(rank, count, excess * count / length)
            head, tail_end = middle, tail

    def _fill(self) -> Int64s:
        """Places the filler documents; returns rows `(document, start, end, rank)`.

        Documents are dealt out in strata of falling density. A rank's share of a stratum is what
        it needs beyond what later strata will bring. All but the last are dealt in whole documents,
        and the next stratum makes up for the difference.
        """
        room = np.array(self._room, dtype=np.int64)
        # Load that the tokens of a rank's room should bring, without the slack.
        need = (
            np.array(self._spare)
            + self._density * room
            - self._packing.slack * self._packing.targets
        )
        filler = self._filler[np.lexsort((self._filler, -self._lengths[self._filler]))]
        tokens = np.concatenate([[0], np.cumsum(self._lengths[filler])])
        loads = np.concatenate([[0.0], np.cumsum(self._loads[filler])])
        strata = np.searchsorted(tokens, np.linspace(0, tokens[-1], _STRATA + 1))
        strata = distinct(np.minimum(strata, len(filler)))
        tables = [np.empty((0, 4), dtype=np.int64)]
        for first, last in zip(strata[:-1].tolist(), strata[1:].tolist(), strict=True):
            documents = filler[first:last]
            edges = tokens[first : last + 1] - tokens[first]
            if last == len(filler):
                # Ranks with the least room get the shortest documents, whose cuts cost least.
                ranks = np.argsort(-room, kind="stable")
                tables.append(_deal(documents, edges, np.cumsum(room[ranks]), ranks))
                break
            rest = (loads[-1] - loads[last]) / float(tokens[-1] - tokens[last])
            here = (loads[last] - loads[first]) / float(edges[-1])
            until = _share_stratum(edges, here, rest, room, need)
            tables.append(_deal(documents, edges, until, np.arange(len(room))))
            reached = np.interp(until, edges, loads[first : last + 1])
            room = room - _steps(until)
            need = need - _steps(reached, loads[first])
        return np.concatenate(tables)


def _share_stratum(edges: Int64s, here: float, rest: float, room: Int64s, need: Floats) -> Int64s:
    """Shares a stratum out; returns the token up to which each rank in turn takes it, `[ranks]`.

    Args:
        edges: tokens before each document of the stratum, and in all, `[documents + 1]`.
        here: load a token of the stratum.
        rest: load a token of the strata after it.
        room: tokens that each rank has room for.
        need: load that these tokens should bring.
    """
    count, lengths = int(edges[-1]), edges[1:] - edges[:-1]
    # Rounding to whole documents may give a rank one more than its share.
    most = np.maximum(room - int(lengths[0]), 0)
    share = np.minimum(np.maximum((need - rest * room) / max(here - rest, 1e-9), 0), most)
    share = share if share.sum() > 0 else room.astype(np.float64)
    wanted = np.cumsum(share) * (count / share.sum())
    until = edges[np.searchsorted(edges[1:] - lengths / 2, wanted)]
    until[-1] = count
    return _within_capacities(until, room)


def _within_capacities(until: Int64s, room: Int64s) -> Int64s:
    """Moves the edges between ranks so that no rank gets more than its room."""
    got = _steps(until)
    over = int(np.maximum(got - room, 0).sum())
    if over == 0:
        return until
    got = np.minimum(got, room)
    given = np.minimum(np.cumsum(room - got), over)
    return np.cumsum(got + _steps(given))


def _deal(documents: Int64s, edges: Int64s, until: Int64s, ranks: Int64s) -> Int64s:
    """Returns the placed pieces `(document, start, end, rank)`: `ranks[i]` takes tokens to
    `until[i]`.

    Args:
        documents: numbers of the documents to deal in turn, `[documents]`.
        edges: tokens before each document, and in all, `[documents + 1]`.
        until: token up to which each rank takes, rising, `[ranks]`.
        ranks: ranks in the order in which they take, `[ranks]`.
    """
    cuts = distinct(np.concatenate([edges[1:], until[until > 0]]))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), cuts[:-1]])
    number = np.searchsorted(edges[1:], starts, side="right")
    rank = ranks[np.searchsorted(until, starts, side="right")]
    return np.column_stack([documents[number], starts - edges[number], cuts - edges[number], rank])


def _split_filler(lengths: Int64s, loads: Floats, packing: Packing) -> tuple[Int64s, Int64s]:
    """Returns the numbers of the filler documents, and of the others."""
    tokens, load = float(packing.capacities.mean()), float(packing.targets.mean())
    small = lengths * _SHORT <= tokens
    small |= (loads * _LIGHT <= load) & (lengths * _NOT_LONG <= tokens)
    return np.flatnonzero(small), np.flatnonzero(~small)


def _base_density(lengths: Int64s, loads: Floats, share: float) -> float:
    """Returns the load a token of the shortest documents with a share of all tokens."""
    order = np.argsort(lengths, kind="stable")
    tokens = np.cumsum(lengths[order])
    low = order[: 1 + np.searchsorted(tokens, share * tokens[-1])]
    return float(loads[low].sum()) / float(lengths[low].sum())


def _most_first(takes: Floats, count: int, ranks_per_node: int) -> Int64s:
    """Finds the ranks that can take most, `count` or some more, node by node: first the node whose
    best `count` ranks can take most, and in it the rank that can."""
    nodes = -(-len(takes) // ranks_per_node)
    by_node = np.zeros((nodes, ranks_per_node))
    by_node.flat[: len(takes)] = takes
    best = takes
    if ranks_per_node > 1:
        best = np.cumsum(-np.sort(-by_node, axis=1)[:, :count], axis=1)[:, -1]
    # Sorting all of thousands of nodes for each document would take most of the time.
    needed = min(-(-count // ranks_per_node) + 1, nodes)
    candidates = np.flatnonzero(best >= np.partition(best, nodes - needed)[nodes - needed])
    first = candidates[np.argsort(-best[candidates], kind="stable")[:needed]]
    within = np.argsort(-by_node[first], axis=1, kind="stable")
    order = (first[:, None] * ranks_per_node + within).ravel()
    return order[order < len(takes)]


def _water_fill(spare: Floats, room: Int64s, density: float, length: int) -> Floats:
    """Gives ranks `length` tokens in all, so that the least spare that is left is largest."""
    # The tokens taken fall with the level of spare, linearly between these levels.
    levels = np.unique(np.concatenate([spare, spare - density * room]))
    taken = np.clip((spare[:, None] - levels) / density, 0, room[:, None]).sum(axis=0)
    level = np.interp(-length, -taken, levels)
    takes: Floats = np.clip((spare - level) / density, 0, room)
    return takes


def _slice_edges(tokens: Int64s, capacities: Int64s, block: int) -> tuple[Int64s, Int64s]:
    """Returns the ends of the heads of mirrored slices and the starts of their tails, `[slices]`.

    The first slice is the outermost; the last one's head ends where its tail starts.

    Args:
        tokens: wanted tokens of each slice; their sum is the document's length.
        capacities: most tokens of each slice.
        block: tokens in a kernel's block; edges are on its multiples if the capacities allow it.
    """
    length = int(tokens.sum())
    until = np.cumsum(tokens)
    # Tokens after the document's last whole block belong to the first slice.
    whole_blocks = length // block * block
    heads = (until - length % block) // (2 * block) * block
    heads = np.minimum(np.maximum.accumulate(np.maximum(heads, 0)), whole_blocks // 2)
    tails = whole_blocks - heads
    heads[-1] = tails[-1]
    too_coarse = length < _BLOCKS_IN_SLICE * block * len(tokens)
    if too_coarse or (_slice_tokens(heads, tails, length) > capacities).any():
        heads = until // 2
        tails = length - (until - heads)
        heads[-1] = tails[-1]
    return heads, tails


def _slice_tokens(heads: Int64s, tails: Int64s, length: int) -> Int64s:
    return _steps(heads) - _steps(tails, length)


def _steps(values: _Values, first: float = 0) -> _Values:
    """Returns the differences of values, of the first one to `first`.

    Planning calls this for each long document and rank, for which `np.diff` with `prepend` is
    slower.
    """
    steps = values.copy()
    steps[1:] -= values[:-1]
    steps[0] -= first
    return steps
