"""Operations on spans, half-open token ranges `[start, end)`, many at a time as int64 arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

_MOST_SORTED = 1 << 62
"""Bound on the numbers that `order_by` sorts."""


def expand_ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """Lists all integers of the ranges `[starts[i], starts[i] + lengths[i])`, range by range.

    Shapes `[n]`, `[n]` -> `[sum(lengths)]`.
    """
    total = int(lengths.sum())
    firsts = np.cumsum(lengths) - lengths
    return np.arange(total, dtype=np.int64) + np.repeat(starts - firsts, lengths)


def distinct(values: Int64s) -> Int64s:
    """Lists the distinct values in rising order, as `np.unique` does.

    From NumPy 2.3 on that fills a hash table, which takes ten times as long for a million values.
    """
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def order_by(*columns: Int64s | Bools) -> Int64s:
    """Lists rows in the order of the first column, among equal ones of the second, and so on.

    Rows that are equal in all columns keep their order, as in `np.lexsort`, which takes the columns
    the other way round. If they fit in one number of 64 bits with the row's own number in its last
    bits, sorting these numbers takes a tenth of the time.
    """
    rows = len(columns[0])
    if rows < 2:
        return np.arange(rows)
    bits, size = rows.bit_length(), 1
    # Changed in place: new memory for thousands of rows takes longer than what is done with it.
    key = np.zeros(rows, dtype=np.int64)
    for column in columns:
        low = int(column.min())
        extent = int(column.max()) - low + 1
        size *= extent
        if size << bits > _MOST_SORTED:
            return np.lexsort(columns[::-1])
        key *= extent
        key += column
        key -= low
    key <<= bits
    key |= np.arange(rows)
    key.sort()
    key &= (1 << bits) - 1
    return key


def numbered(values: Int64s) -> tuple[Int64s, Int64s]:
    """Numbers distinct values in rising order.

    Returns `(first, number)`: the first row with each value, and the number of each row's value.
    """
    order = order_by(values)
    ordered = values[order]
    opens = np.ones(len(values), dtype=bool)
    opens[1:] = ordered[1:] != ordered[:-1]
    number = np.empty(len(values), dtype=np.int64)
    number[order] = np.cumsum(opens) - 1
    return order[opens], number


def sums(groups: Int64s, values: Int64s, total_groups: int) -> Int64s:
    """Adds up values by group, int64 `[total_groups]`."""
    added = np.zeros(total_groups, dtype=np.int64)
    np.add.at(added, groups, values)
    return added


def cut_at(starts: Int64s, ends: Int64s, cuts: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Cuts the ranges `[starts[i], ends[i])` wherever one of the sorted `cuts` lies inside.

    Returns `(source, starts, ends)` of the parts: part `j` is of range `source[j]`. Empty ranges
    are dropped.
    """
    first = np.searchsorted(cuts, starts, side="right")
    last = np.searchsorted(cuts, ends, side="left")
    parts = np.where(ends > starts, last - first + 1, 0)
    source = np.repeat(np.arange(len(starts), dtype=np.int64), parts)
    within = expand_ranges(np.zeros_like(parts), parts)
    padded = np.concatenate([cuts, np.zeros(1, dtype=np.int64)])
    left = np.where(within == 0, starts[source], padded[first[source] + within - 1])
    right = np.where(within == parts[source] - 1, ends[source], padded[first[source] + within])
    return source, left, right


def union(groups: Int64s, starts: Int64s, ends: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Unites ranges, separately for each group; ranges that touch are joined.

    Returns `(groups, starts, ends)` sorted by group, then start. Empty ranges are dropped.
    """
    kept = ends > starts
    groups, starts, ends = groups[kept], starts[kept], ends[kept]
    if len(groups) == 0:
        return groups, starts, ends
    # Groups are laid out on one line, with gaps between them, so that one sweep serves all.
    stride = int(ends.max()) + 2
    line_starts = groups * stride + starts
    order = order_by(line_starts)
    groups, line_starts = groups[order], line_starts[order]
    reached = np.maximum.accumulate(groups * stride + ends[order])
    opens = np.ones(len(groups), dtype=bool)
    opens[1:] = line_starts[1:] > reached[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(groups)) - 1
    found = groups[first]
    return found, line_starts[first] - found * stride, reached[last] - found * stride


def covered(
    groups: Int64s, starts: Int64s, ends: Int64s, total_groups: int, times: Sequence[int]
) -> Int64s:
    """Counts the positions that at least that many ranges contain, separately for each group.

    Returns int64 `[len(times), total_groups]`.
    """
    # Groups are laid out on one line. The last bit of each edge tells whether a range begins there.
    stride = int(ends.max(initial=0)) + 1
    edges = 2 * (np.concatenate([starts, ends]) + stride * np.tile(groups, 2))
    edges[: len(starts)] += 1
    edges.sort()
    depth = np.cumsum(2 * (edges & 1) - 1)
    steps = np.diff(edges >> 1, append=0)
    # All ranges of a group have ended before the next group's begin.
    first = np.searchsorted(edges, 2 * stride * np.arange(total_groups + 1))
    found = []
    for least in times:
        before = np.cumsum(np.where(depth >= least, steps, 0))
        found.append(np.diff(np.concatenate([[0], before])[first]))
    return np.stack(found)
