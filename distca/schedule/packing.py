"""Balanced placement: documents packed so that ranks start with nearly equal loads.

**Why.** Only the number of tokens binds a rank: which documents they belong to is ours to choose.
A query that its owner computes does not travel, so a load that is moved by placing tokens costs the
keys alone, and no bytes at all where documents stay whole; moved by tasks it costs queries, outputs
and keys. And a document placed one rank after the other has one hot owner, who sends its first keys
to everybody; spread over several ranks, each sends a part.

**Mirrored slices.** Row `x` of a document of `L` tokens sees `x + 1` keys, row `L - 1 - x` sees
`L - x`: a slice of `t` tokens that is made of mirror images, a head and a tail, has `t * (L + 1)/2`
pairs wherever it lies. So a document can be spread in slices of any sizes, with loads in proportion
to their tokens (this is the head-tail or zigzag sharding of context parallelism, with unequal
shares). A rank with a slice receives nearly all keys of the document, `L` rows.

**Packing.** Short documents are *filler*: they have about the load `rho` a token, and wherever
tokens are missing they fill up. What matters of another document is its *excess*, its load less
`rho * L`; a rank has the room of its tokens, and the *spare* `(1 + slack) * target - rho * room`.
It is one-dimensional bin packing with a second bound:

1. documents in the order of their excess, the largest first: whole onto the rank with the least
   spare that suffices, and room for its tokens (best fit: it leaves large spares for others);
2. if there is none, spread in mirrored slices over as few ranks as can take it, those that can take
   most first, within one node where the topology has nodes and one of them suffices; each is filled
   before the next begins, so that few ranks hold slices of two documents;
3. filler: ranks in the order of the load that a token of their room should bring, the documents
   in the order of their length, one after the other, cut where a rank is full. These cuts go
   through short documents and cost few bytes.

All but step 2 is exact in tokens, and heuristic in load: what remains is for moving tasks
(`distca.schedule.moves`). `O(D log D + P (log n + s))` for `D` documents, `n` ranks, `P` documents
that are no filler (at most 32 times as many as ranks) and `s` ranks tried for each.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from distca.plan import Placement
from distca.plan.span import Floats, Int64s

_SHORT, _LIGHT, _NOT_LONG = 32, 8, 4
"""Filler documents have at most one 32th of a rank's tokens; or an eighth of its load and a quarter
of its tokens."""
_STRATA = 12
"""Filler is dealt out in this many parts, the densest first."""
_BLOCKS_IN_SLICE = 8
"""Slices are cut on blocks where they have so many in the mean."""
_MOST_MEMBERS = 2
"""A document is spread over at most this many times the ranks that it needs if they were empty."""
_LEAST_DENSITY = 1e-6
"""Of what ranks spare a token: a document that is lighter is spread as if it weighed so much."""


@dataclass(frozen=True)
class Packing:
    """What documents are packed by.

    Attributes:
        rooms: tokens that each rank owns, int64 `[ranks]`; their sum is that of the documents.
        targets: the load that each rank should have, `[ranks]`.
        base_share: a token of filler is taken to have the load of those of the shortest documents
            with this share of all tokens.
        slack: how far above its target a rank may be loaded by a document, as a fraction of it.
        overfill: how much further, so that a document need not be spread.
        ranks_per_node: ranks `[0, ranks_per_node)` share the first node, and so on.
        block: slices are cut on its multiples where documents are long enough.
    """

    rooms: Int64s
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
        loads: of each document, in the unit of the targets, `[documents]`.
        packing: what binds.
    """
    return _Packer(lengths, loads, packing).place()


class _Packer:
    """The state of one packing."""

    def __init__(self, lengths: Int64s, loads: Floats, packing: Packing) -> None:
        self._lengths, self._loads, self._packing = lengths, loads, packing
        self._filler, self._others = _split_filler(lengths, loads, packing)
        self._density = _base_density(lengths, loads, packing.base_share)
        self._room = packing.rooms.copy()
        self._spare = packing.targets * (1 + packing.slack) - self._density * packing.rooms
        self._whole_spare = max(float(self._spare.max()), 1e-9)
        # (spare, rank), rising, of the ranks with room for a document that is no filler.
        self._by_spare = sorted((float(spare), rank) for rank, spare in enumerate(self._spare))
        self._rows: list[tuple[int, int, int, int]] = []

    def place(self) -> Placement:
        excess = self._loads - self._density * self._lengths
        others = self._others[np.lexsort((self._others, -excess[self._others]))]
        self._shortest = int(self._lengths[others].min(initial=0))
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
        order = np.lexsort((start, document, rank))
        return Placement(
            document[order], start[order], end[order], rank[order], len(self._packing.rooms)
        )

    def _emptiest(self, length: int, wanted: float) -> int | None:
        """Of the ranks with room for a document the one with most spare, if that may take it."""
        for spare, rank in reversed(self._by_spare):
            if wanted - spare > self._packing.overfill * self._packing.targets[rank]:
                return None
            if self._room[rank] >= length:
                return rank
        return None

    def _take(self, rank: int, tokens: int, load: float) -> None:
        before = float(self._spare[rank])
        at = bisect_left(self._by_spare, (before, rank))
        if at < len(self._by_spare) and self._by_spare[at] == (before, rank):
            del self._by_spare[at]
        self._room[rank] -= tokens
        self._spare[rank] = before - load
        if self._room[rank] >= self._shortest:
            insort(self._by_spare, (before - load, rank))

    def _spread(self, document: int, length: int, excess: float) -> None:
        """Places mirrored slices of a document on the ranks that can take most of it."""
        # Where a token weighs nearly nothing (or less) it must still count beside what ranks spare.
        least = _LEAST_DENSITY * float(np.abs(self._spare).max()) / max(int(self._room.max()), 1)
        density = max(excess / length, least, 1e-9)
        takes = np.minimum(self._room, np.maximum(self._spare, 0) / density)
        fewest = math.ceil(excess / self._whole_spare)
        most = max(_MOST_MEMBERS * fewest, 2)
        order = _most_first(takes, most, self._packing.ranks_per_node)
        enough = int(np.searchsorted(np.cumsum(takes[order]), length - 0.5)) + 1
        members = order[: min(enough, most)]
        if enough > min(most, len(order)):
            # The rest goes where it does least harm.
            if self._room[members].sum() < length:
                roomy = np.argsort(-self._room, kind="stable")
                members = roomy[: 1 + np.searchsorted(np.cumsum(self._room[roomy]), length)]
            room = self._room[members]
            takes[members] = _water_fill(self._spare[members], room, density, length)
        rooms = self._room[members]
        wanted = np.minimum(np.ceil(takes[members]).astype(np.int64), rooms)
        wanted = np.diff(np.minimum(np.cumsum(wanted), length), prepend=0)
        assert int(wanted.sum()) == length, f"document {document} fits no ranks"
        heads, tails = _slice_edges(wanted, rooms, self._packing.block)
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
        """Rows of the filler documents.

        They are dealt out in strata of falling density. A rank's share of a stratum is what it
        needs beyond what the strata after it will bring; all but the last are dealt in whole
        documents, and what that leaves open is made up by the next.
        """
        room = np.array(self._room, dtype=np.int64)
        # What all of its room's tokens should bring, without the slack.
        need = (
            np.array(self._spare)
            + self._density * room
            - self._packing.slack * self._packing.targets
        )
        filler = self._filler[np.lexsort((self._filler, -self._lengths[self._filler]))]
        tokens = np.concatenate([[0], np.cumsum(self._lengths[filler])])
        loads = np.concatenate([[0.0], np.cumsum(self._loads[filler])])
        strata = np.searchsorted(tokens, np.linspace(0, tokens[-1], _STRATA + 1))
        strata = np.unique(np.minimum(strata, len(filler)))
        tables = [np.empty((0, 4), dtype=np.int64)]
        for first, last in zip(strata[:-1].tolist(), strata[1:].tolist(), strict=True):
            documents = filler[first:last]
            edges = tokens[first : last + 1] - tokens[first]
            if last == len(filler):
                # The smallest rooms get the shortest documents, of which the cuts cost least.
                ranks = np.argsort(-room, kind="stable")
                tables.append(_deal(documents, edges, np.cumsum(room[ranks]), ranks))
                break
            rest = (loads[-1] - loads[last]) / float(tokens[-1] - tokens[last])
            until = _share_stratum(edges, loads[first : last + 1], rest, room, need)
            tables.append(_deal(documents, edges, until, np.arange(len(room))))
            reached = np.interp(until, edges, loads[first : last + 1])
            room = room - np.diff(until, prepend=0)
            need = need - np.diff(reached, prepend=loads[first])
        return np.concatenate(tables)


def _share_stratum(edges: Int64s, loads: Floats, rest: float, room: Int64s, need: Floats) -> Int64s:
    """Up to which token of a stratum each rank takes, one rank after the other, `[ranks]`.

    Args:
        edges: tokens before each document of the stratum, and all of them, `[documents + 1]`.
        loads: the same of loads, from wherever they are counted.
        rest: the load a token of the strata after this one.
        room: tokens that each rank has room for.
        need: the load that they should bring.
    """
    count, lengths = int(edges[-1]), np.diff(edges)
    here = float(loads[-1] - loads[0]) / count
    # A rank may get a document more than its share.
    most = np.maximum(room - int(lengths[0]), 0)
    share = np.clip((need - rest * room) / max(here - rest, 1e-9), 0, most)
    share = share if share.sum() > 0 else room.astype(np.float64)
    wanted = np.cumsum(share) * (count / share.sum())
    until = edges[np.searchsorted(edges[1:] - lengths / 2, wanted)]
    until[-1] = count
    return _within_rooms(until, room)


def _within_rooms(until: Int64s, room: Int64s) -> Int64s:
    """Moves the edges between ranks so that none gets more than its room."""
    got = np.diff(until, prepend=0)
    over = int(np.maximum(got - room, 0).sum())
    if over == 0:
        return until
    got = np.minimum(got, room)
    given = np.minimum(np.cumsum(room - got), over)
    return np.cumsum(got + np.diff(given, prepend=0))


def _deal(documents: Int64s, edges: Int64s, until: Int64s, ranks: Int64s) -> Int64s:
    """Placed pieces `(document, start, end, rank)`: `ranks[i]` takes tokens to `until[i]`.

    Args:
        documents: one after the other, `[documents]`.
        edges: tokens before each, and all of them, `[documents + 1]`.
        until: rising, `[ranks]`.
        ranks: `[ranks]`.
    """
    cuts = np.union1d(edges[1:], until[until > 0])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), cuts[:-1]])
    number = np.searchsorted(edges[1:], starts, side="right")
    rank = ranks[np.searchsorted(until, starts, side="right")]
    return np.column_stack([documents[number], starts - edges[number], cuts - edges[number], rank])


def _split_filler(lengths: Int64s, loads: Floats, packing: Packing) -> tuple[Int64s, Int64s]:
    """The numbers of the filler documents, and of the others."""
    tokens, load = float(packing.rooms.mean()), float(packing.targets.mean())
    small = lengths * _SHORT <= tokens
    small |= (loads * _LIGHT <= load) & (lengths * _NOT_LONG <= tokens)
    return np.flatnonzero(small), np.flatnonzero(~small)


def _base_density(lengths: Int64s, loads: Floats, share: float) -> float:
    """The load a token of the shortest documents."""
    order = np.argsort(lengths, kind="stable")
    tokens = np.cumsum(lengths[order])
    low = order[: 1 + np.searchsorted(tokens, share * tokens[-1])]
    return float(loads[low].sum()) / float(lengths[low].sum())


def _most_first(takes: Floats, count: int, ranks_per_node: int) -> Int64s:
    """Ranks in the order of what they can take, node by node: the one whose best `count` ranks take
    most comes first."""
    order = np.argsort(-takes, kind="stable")
    if ranks_per_node == 1:
        return order
    node = order // ranks_per_node
    by_node = np.argsort(node, kind="stable")
    within = np.empty(len(order), dtype=np.int64)
    within[by_node] = np.arange(len(order)) - np.searchsorted(node[by_node], node[by_node])
    best = np.bincount(node, weights=np.where(within < count, takes[order], 0.0))
    return order[np.lexsort((within, node, -best[node]))]


def _water_fill(spare: Floats, room: Int64s, density: float, length: int) -> Floats:
    """Tokens for each rank, `length` in all, so that the least spare that is left is largest."""
    # The tokens taken fall with the level, linearly between these levels.
    levels = np.unique(np.concatenate([spare, spare - density * room]))
    taken = np.clip((spare[:, None] - levels) / density, 0, room[:, None]).sum(axis=0)
    level = np.interp(-length, -taken, levels)
    takes: Floats = np.clip((spare - level) / density, 0, room)
    return takes


def _slice_edges(tokens: Int64s, rooms: Int64s, block: int) -> tuple[Int64s, Int64s]:
    """Where the heads of mirrored slices end and where their tails start, `[slices]` each.

    The first slice is the outermost; the last one's head ends where its tail starts.

    Args:
        tokens: wanted for each slice; their sum is the document's length.
        rooms: no slice has more tokens.
        block: edges lie on its multiples where rooms allow, else anywhere.
    """
    length = int(tokens.sum())
    until = np.cumsum(tokens)
    # The odd tokens at the document's end belong to the first slice.
    whole_blocks = length // block * block
    heads = (until - length % block) // (2 * block) * block
    heads = np.minimum(np.maximum.accumulate(np.maximum(heads, 0)), whole_blocks // 2)
    tails = whole_blocks - heads
    heads[-1] = tails[-1]
    too_coarse = length < _BLOCKS_IN_SLICE * block * len(tokens)
    if too_coarse or (_slice_tokens(heads, tails, length) > rooms).any():
        heads = until // 2
        tails = length - (until - heads)
        heads[-1] = tails[-1]
    return heads, tails


def _slice_tokens(heads: Int64s, tails: Int64s, length: int) -> Int64s:
    """How many tokens each slice has."""
    return np.diff(heads, prepend=0) - np.diff(tails, prepend=length)
