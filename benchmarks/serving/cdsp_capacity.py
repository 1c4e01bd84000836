"""What CDSP's search is held against: all nested groups and chunk lengths, by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from distca.schedule.serving.cdsp import PrefillTimes


def best_of_all(
    times: PrefillTimes, queued: Sequence[float], tokens: int, pieces: int = 16
) -> float:
    """Least time to the first token over all nested groups, and chunks of so many parts.

    For few ranks of one node: groups are all subsets whose size is a degree.
    """
    groups = [
        frozenset(ranks)
        for degree in times.degrees
        for ranks in itertools.combinations(range(len(queued)), degree)
    ]
    edges = [tokens * piece // pieces for piece in range(pieces + 1)]
    # Earliest end of so many pieces, the last of them on a group. Nothing is done at once.
    ends: dict[tuple[frozenset[int], int], float] = {(frozenset(), 0): 0.0}
    for group in groups:
        free = max(queued[rank] for rank in group)
        before = [(done, end) for (part, done), end in ends.items() if part < group]
        for done, end in before:
            for upto in range(done + 1, pieces + 1):
                size = edges[upto] - edges[done]
                found = max(end, free) + times.seconds(len(group), edges[done], size)
                if found < ends.get((group, upto), float("inf")):
                    ends[group, upto] = found
    return min(end for (_, done), end in ends.items() if done == pieces)
