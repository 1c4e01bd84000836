"""Grids: queries and keys of documents on many ranks, cut in two dimensions.

A rank that computes all its own queries of a document receives all the document's keys. Two or
three ranks have no cheaper way, but many do: `r` ranks together receive each key `r` times. Instead
the `r` owners, in the order of their mirrored slices, form groups of `s`. All queries of a group go
to each of its members, which computes them over `1/s` of the keys; partial outputs merge by LSE at
their owners. With `w_q` bytes for a query row, its output and its LSE, and `w_kv` for a key and a
value row, a member receives of a document of `L` tokens

    V(s) = L * (w_q * (s - 1) / r + w_kv / s)       least at s = sqrt(r * w_kv / w_q),

against `L * w_kv * (1 - 1/r)` for `s = 1`; with four query heads to a key-value head, where `w_q`
is four times `w_kv`, grids begin to pay at 12 ranks, and at 64 they move half of the bytes.

**Balance.** A group's queries are two ranges, its members' heads and their tails. Its keys are
shared out in consecutive ranges, cut on blocks where the pairs that the group's queries see below
the cut reach the members' shares, so that every member keeps its load. Fewer queries travel than
the formula says: the first member, with the first keys, has all that its own head needs, and no
head needs the last keys. Pairs above the diagonal are cut away: a rectangle that the diagonal
crosses becomes a task that ends on the diagonal and a full rectangle below it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, Tasks
from distca.plan.span import Floats, Int64s, order_by
from distca.schedule.base import tasks_at_home

_LEAST_GAIN = 0.95
"""Part of the bytes of computing at home below which a grid must stay."""


def initial_tasks(
    lengths: Int64s,
    placement: Placement,
    mask: Mask,
    shape: AttentionShape,
    block: int,
    prefix: Int64s | None = None,
    query_shift: Int64s | None = None,
) -> Tasks:
    """Makes grids of documents mirrored over many ranks, and tasks at home of all others.

    Documents with a `prefix`, tokens of a parent, and those with a `query_shift` have no grids.
    """
    home = tasks_at_home(placement, mask, lengths, query_shift)
    if mask.window_left is not None:
        return home
    owners = np.bincount(placement.document, minlength=len(lengths))
    wide = [
        document
        for document in np.flatnonzero(owners >= _fewest_ranks(shape)).tolist()
        if lengths[document] >= 4 * block * owners[document]
        and (prefix is None or not prefix[document])
        and (query_shift is None or not query_shift[document])
    ]
    if not wide:
        return home
    is_wide = np.zeros(len(lengths), dtype=bool)
    blocks = []
    order = order_by(placement.document)
    first = np.searchsorted(placement.document[order], wide, side="left")
    last = np.searchsorted(placement.document[order], wide, side="right")
    for document, i, j in zip(wide, first.tolist(), last.tolist(), strict=True):
        of = order[i:j]
        rows = _grid(
            document,
            int(lengths[document]),
            placement.start[of],
            placement.end[of],
            placement.rank[of],
            shape,
            block,
        )
        if rows is not None:
            is_wide[document] = True
            blocks.append(rows)
    if not blocks:
        return home
    gridded = below_diagonal(*np.concatenate(blocks).T)
    rest = home[~is_wide[home.document]]
    return Tasks.concatenate([rest, gridded])


def below_diagonal(
    document: Int64s,
    q_start: Int64s,
    q_end: Int64s,
    kv_start: Int64s,
    kv_end: Int64s,
    server: Int64s,
) -> Tasks:
    """Makes tasks of the causally visible part of rectangles: first those on the diagonal.

    All arguments are int64 `[rectangles]`; rectangles without visible pairs are dropped.
    """
    cut = np.clip(kv_end, q_start, q_end)
    on_start, on_end = np.maximum(q_start, kv_start), cut
    crossed = on_end > on_start
    below = q_end > cut
    return Tasks(
        np.concatenate([document[crossed], document[below]]),
        np.concatenate([on_start[crossed], cut[below]]),
        np.concatenate([on_end[crossed], q_end[below]]),
        np.concatenate([kv_start[crossed], kv_start[below]]),
        np.concatenate([on_end[crossed], kv_end[below]]),
        np.concatenate([server[crossed], server[below]]),
    )


@lru_cache
def members_of_group(ranks: int, shape: AttentionShape) -> int:
    """Returns how many of a document's ranks should form a group that shares its queries."""
    w_q, w_kv = shape.round_trip_bytes, shape.moved_kv_row_bytes
    sizes = np.arange(1, ranks + 1)
    received = w_q * (sizes - 1) / ranks + w_kv / sizes
    at_home = w_kv * (1 - 1 / ranks)
    best = int(received.argmin())
    return best + 1 if received[best] < _LEAST_GAIN * at_home else 1


@lru_cache
def _fewest_ranks(shape: AttentionShape) -> int:
    """Returns the least number of ranks for which a grid pays."""
    ranks = 4
    while members_of_group(ranks, shape) == 1 and ranks < 1 << 16:
        ranks += 1
    return ranks


def _grid(
    document: int,
    length: int,
    start: Int64s,
    end: Int64s,
    rank: Int64s,
    shape: AttentionShape,
    block: int,
) -> Int64s | None:
    """Makes the grid of a document; None if its pieces are not mirrored, or no grid pays.

    Args:
        document: number of the document.
        length: tokens of the document.
        start: starts of its placed pieces, `[pieces]`; likewise `end` and `rank`.
        shape: attention heads of one tensor-parallel rank.
        block: tokens in a kernel's block; keys are cut on its multiples.

    Returns:
        Rectangles `(document, q_start, q_end, kv_start, kv_end, server)`, int64 `[rectangles, 6]`.
    """
    order = np.argsort(start)
    start, end, rank = start[order], end[order], rank[order]
    members = np.unique(rank)
    heads = len(members)
    if len(rank) not in (2 * heads, 2 * heads - 1):
        return None
    owners = rank[:heads]
    # The first half of the pieces are heads, and the tails mirror their order.
    if len(np.unique(owners)) != heads or (rank[::-1][: heads - 1] != owners[: heads - 1]).any():
        return None
    tokens = np.array([int((end - start)[rank == owner].sum()) for owner in owners])
    group_size = members_of_group(heads, shape)
    if group_size == 1:
        return None
    groups = max(1, round(heads / group_size))
    edges = np.linspace(0, heads, groups + 1).round().astype(np.int64)
    rows = []
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        queries = [(int(start[low]), int(end[high - 1]))]
        tail_first, tail_last = len(rank) - high, len(rank) - 1 - low
        if tail_first >= heads:
            queries.append((int(start[tail_first]), int(end[tail_last])))
        elif tail_last >= heads:
            # The innermost slice is one piece, as head and tail touch.
            queries = [(int(start[low]), int(end[tail_last]))]
        shares = np.cumsum(tokens[low:high]) / tokens[low:high].sum()
        keys = _share_keys(queries, shares, block)
        rows += [
            (document, *span, kv_start, kv_end, int(owner))
            for owner, kv_start, kv_end in zip(owners[low:high], keys[:-1], keys[1:], strict=True)
            for span in queries
        ]
    return np.array(rows, dtype=np.int64)


def _share_keys(queries: list[tuple[int, int]], shares: Floats, block: int) -> list[int]:
    """Cuts the keys of some queries so that each part has its share of their pairs.

    Args:
        queries: ranges of query positions.
        shares: cumulative shares of the parts; the last is 1.
        block: tokens in a kernel's block; cuts fall on its multiples.

    Returns:
        Edges of the parts, from 0 to the end of the queries, one more than `shares`.
    """
    last = max(end for _, end in queries)
    cuts = np.arange(0, last, block, dtype=np.int64)
    below = np.zeros(len(cuts))
    for start, end in queries:
        column = np.full_like(cuts, start)
        below += Mask().pairs(column, np.full_like(cuts, end), np.zeros_like(cuts), cuts)
    every = sum(Mask().pairs(start, end, 0, end) for start, end in queries)
    index = np.searchsorted(below, shares[:-1] * every)
    return [0, *cuts[np.minimum(index, len(cuts) - 1)].tolist(), last]
