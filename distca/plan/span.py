"""Operations on spans, half-open token ranges `[start, end)`, many at a time as int64 arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


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
    order = np.lexsort((starts, groups))
    groups = groups[order]
    line_starts = groups * stride + starts[order]
    reached = np.maximum.accumulate(groups * stride + ends[order])
    opens = np.ones(len(groups), dtype=bool)
    opens[1:] = line_starts[1:] > reached[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(groups)) - 1
    found = groups[first]
    return found, line_starts[first] - found * stride, reached[last] - found * stride


def covered(
    groups: Int64s, starts: Int64s, ends: Int64s, total_groups: int, times: int = 1
) -> Int64s:
    """Counts the positions that at least `times` ranges contain, separately for each group.

    Returns int64 `[total_groups]`.
    """
    group, position = np.tile(groups, 2), np.concatenate([starts, ends])
    change = np.repeat([1, -1], len(groups))
    order = np.lexsort((position, group))
    group, position = group[order], position[order]
    # All ranges of a group have ended before the next group's begin.
    depth = np.cumsum(change[order])[:-1]
    counts = np.zeros(total_groups, dtype=np.int64)
    np.add.at(counts, group[:-1], np.where(depth >= times, np.diff(position), 0))
    return counts
