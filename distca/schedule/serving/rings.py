"""Steps of a prefill's plan: what travels goes round a ring, while servers compute the step before.

Ranks pass rows on downwards, from `r` to `r - 1`: then a rank needs all that it passes on, since of
a prompt sharded in zigzag it sees the late keys of the ranks above alone (upwards some would carry
rows for others). So of `T` new tokens `(N - 1) T 3/4` rows of keys travel, each between neighbours.
The `k`th rank downwards that needs rows has them in step `k`; ranks that need none are left out.

Keys that earlier turns left may lie unevenly. A rank that holds more than an even share passes them
on share by share, in a step each, so that ranks send about equally much in every step, rather than
one all that it holds to all others.

Under a window only the keys before a rank's own piece travel, while it computes queries that do not
see them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.plan import Mask, Placement, Tasks
from distca.plan.span import Bools, Int64s, cut_at, distinct, expand_ranges

Stepped = tuple[Tasks, Int64s]
"""Tasks, and the step of each, int64 `[tasks]`."""


def pass_keys(placement: Placement, new: Placement, block: int) -> Stepped:
    """Makes tasks at home, to which keys travel, and the step of each.

    Args:
        placement: all pieces, sorted by sequence and position.
        new: pieces that have queries.
        block: tokens in a kernel's block.
    """
    keys, share = _in_even_shares(placement, new, block)
    q, kv = visible_pieces(keys, new)
    hop = _hops(kv, keys.rank[kv], new.rank[q], new.world_size)
    step = np.where(hop > 0, hop + share[kv], 0)
    return tasks_of(keys, new, q, kv, new.rank[q]), step


def pass_queries(placement: Placement, new: Placement, mask: Mask, in_steps: bool) -> Stepped:
    """Makes tasks of each new piece's queries over each piece of keys that they see, at the keys,
    and the step of each.

    Args:
        placement: all pieces, sorted by sequence and position.
        new: pieces that have queries; under a window each has one.
        mask: attention mask.
        in_steps: whether queries go round the ring; else to all servers at once.
    """
    q, kv = visible_pieces(placement, new)
    seen = placement.end[kv] > mask.first_key(new.start[q])
    q, kv = q[seen], kv[seen]
    server = placement.rank[kv]
    step = _hops(q, new.rank[q], server, new.world_size) * in_steps
    tasks = tasks_of(placement, new, q, kv, server)
    first_key = mask.first_key(tasks.q_start)
    return replace(tasks, kv_start=np.maximum(tasks.kv_start, first_key)), step


def pass_keys_in_window(placement: Placement, new: Placement, mask: Mask, block: int) -> Stepped:
    """Makes tasks at home under a window, and the step of each: in step 0 are the queries that see
    a rank's own keys alone.

    Args:
        placement: all pieces, sorted by sequence and position.
        new: pieces that have queries.
        mask: attention mask, with a window.
        block: tokens in a kernel's block.
    """
    assert mask.window_left is not None
    runs, stride = placement.joined(), _stride(placement)
    line = runs.document * stride + runs.start
    order = np.argsort(line)
    run = np.searchsorted(line[order], new.document * stride + new.start, side="right") - 1
    own = runs.start[order][run]
    sees_own = np.where(own > 0, own + mask.window_left, 0)
    cut = np.where(sees_own > new.start, -(-sees_own // block) * block, new.start)
    cut = np.minimum(cut, new.end)
    start, end = np.concatenate([cut, new.start]), np.concatenate([new.end, cut])
    document, rank = np.tile(new.document, 2), np.tile(new.rank, 2)
    later = np.repeat([0, 1], len(cut))[end > start]
    tasks = Tasks(document, start, end, mask.first_key(start), end, rank)[end > start]
    # There may be none of the first.
    return tasks, later - later.min(initial=1)


def visible_pieces(keys: Placement, new: Placement) -> tuple[Int64s, Int64s]:
    """Numbers of the new pieces and of the pieces of keys that they see, for each such pair.

    Args:
        keys: all pieces, sorted by sequence and position, the new ones among them.
        new: pieces that have queries.
    """
    stride = _stride(keys)
    line = keys.document * stride + keys.start
    itself = np.searchsorted(line, new.document * stride + new.start)
    first = np.searchsorted(keys.document, new.document)
    count = itself - first + 1
    return np.repeat(np.arange(len(count)), count), expand_ranges(first, count)


def tasks_of(keys: Placement, new: Placement, q: Int64s, kv: Int64s, server: Int64s) -> Tasks:
    """Makes the tasks of pairs of pieces."""
    queries = new.document[q], new.start[q], new.end[q]
    return Tasks(*queries, keys.start[kv], keys.end[kv], server)


def _stride(pieces: Placement) -> int:
    """Distance of sequences, if the positions of all are laid out on one line."""
    return int(pieces.end.max(initial=0)) + 1


def _hops(traveller: Int64s, home: Int64s, server: Int64s, ranks: int) -> Int64s:
    """Returns the step in which each server has each traveller, 0 at its home.

    Args:
        traveller: number of what travels, for each task.
        home: rank that owns it.
        server: rank that needs it.
        ranks: ranks of the ring.
    """
    downwards = (home - server) % ranks
    pairs, of_task = np.unique(traveller * ranks + downwards, return_inverse=True)
    return of_task - np.searchsorted(pairs, traveller * ranks + 1) + 1


def _is_cached(pieces: Placement, new: Placement) -> Bools:
    """Returns whether pieces have keys and values alone."""
    prefix = np.full(int(pieces.document.max(initial=-1)) + 1, _stride(pieces))
    np.minimum.at(prefix, new.document, new.start)
    return pieces.start < prefix[pieces.document]


def _in_even_shares(pieces: Placement, new: Placement, block: int) -> tuple[Placement, Int64s]:
    """Cuts cached pieces where a rank holds more of a sequence than ranks do on average.

    Returns:
        The pieces, and the number of the share that each is in, among those of its owner.
    """
    ranks, stride = pieces.world_size, _stride(pieces)
    lengths = pieces.end - pieces.start
    group = pieces.document * ranks + pieces.rank
    rows = np.zeros((int(pieces.document.max(initial=-1)) + 1, ranks), dtype=np.int64)
    np.add.at(rows, (pieces.document, pieces.rank), lengths)
    even = np.maximum(rows.sum(axis=1, keepdims=True) / ranks, 1)
    size = np.ceil(rows / np.maximum(np.round(rows / even), 1)).astype(np.int64)
    size = (-(-size // block) * block).ravel()[group]
    order = np.argsort(group, kind="stable")
    before = np.empty_like(lengths)
    before[order] = np.cumsum(lengths[order]) - lengths[order]
    before -= before[order][np.searchsorted(group[order], group)]
    # Multiples of the shares' size among the owner's rows, at blocks of positions.
    cuts = np.where(_is_cached(pieces, new), (before + lengths - 1) // size - before // size, 0)
    piece = np.repeat(np.arange(len(cuts)), cuts)
    row = expand_ranges(before // size + 1, cuts) * size[piece]
    position = pieces.start[piece] + row - before[piece]
    position = np.clip(
        (position + block // 2) // block * block, pieces.start[piece], pieces.end[piece]
    )
    line = pieces.document * stride
    source, start, end = cut_at(
        line + pieces.start, line + pieces.end, distinct(line[piece] + position)
    )
    start, end = start - line[source], end - line[source]
    middle = before[source] + (start + end) // 2 - pieces.start[source]
    shares, share = np.unique(group[source] * stride + middle // size[source], return_inverse=True)
    share = share - np.searchsorted(shares, group[source] * stride)
    return Placement(pieces.document[source], start, end, pieces.rank[source], ranks), share
