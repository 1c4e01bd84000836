"""Documents of a global batch shared out over its micro-batches, so that these have equal loads.

Micro-batches follow each other, so in one process group only their sum counts; but pipeline stages
work on different ones at the same time, and a long document alone in its micro-batch has fewer
short ones beside it to fill ranks with. Every micro-batch must have the same number of tokens, to
the token, and every document stays whole: that is a partition problem, and exact solutions are
found because short documents are many.

1. Documents in the order of their load, the heaviest first, go to the micro-batch with the least
   load that has room; every other of the light ones (`_POOL` for each micro-batch) is kept back.
2. Each micro-batch in turn is filled up: the longest of the pool that leaves room, until the room
   is a few documents' worth, then a subset of the pool that fits exactly. Which sums can be reached
   is a set of bits; adding a document shifts it (the dynamic program for subset sums, with Python's
   long integers as bit sets). The last micro-batch gets the rest, which fits by itself.

Where no exact fit is found, or it gains nothing, the documents stay in the windows they came in.
"""

from __future__ import annotations

import numpy as np

from distca.plan.span import Floats, Int64s

_POOL = 48
"""Short documents that are kept back for each micro-batch, to fit its tokens exactly."""
_FEW = (20, 8, 3)
"""So many documents' worth of room is left to be filled exactly: fewer if that fails."""
_EXACT = 96
"""The subset that fits exactly is looked for among so many documents."""
_LEAST_GAIN = 0.01
"""The heaviest micro-batch must become lighter by this part of the mean."""


def share_out(lengths: Int64s, loads: Floats, windows: Int64s) -> Int64s:
    """The micro-batch of each document, int64 `[documents]`.

    Args:
        lengths: tokens of each document, int64 `[documents]`.
        loads: of each document, `[documents]`.
        windows: the micro-batch that each document came in, int64 `[documents]`; all hold the same
            number of tokens, and so do those of the answer.
    """
    count = int(windows.max(initial=0)) + 1
    if count == 1:
        return windows
    tokens = np.bincount(windows, weights=lengths, minlength=count)
    assert (tokens == tokens[0]).all(), f"micro-batches of different sizes: {tokens}"
    shared = whole_documents(lengths, loads, count, int(tokens[0]))
    if shared is None:
        return windows
    before, after = (
        float(np.bincount(by, weights=loads, minlength=count).max()) for by in (windows, shared)
    )
    gained = before - after > _LEAST_GAIN * float(loads.sum()) / count
    return shared if gained else windows


def whole_documents(lengths: Int64s, loads: Floats, count: int, room: int) -> Int64s | None:
    """Groups of whole documents with equally many tokens and nearly equal loads.

    Args:
        lengths: tokens of each document, int64 `[documents]`; `count * room` in all.
        loads: of each document, `[documents]`.
        count: groups.
        room: tokens of each.

    Returns:
        The group of each document, int64 `[documents]`; None where no exact fit was found.
    """
    found = (_balanced(lengths, loads, count, room, few) for few in _FEW)
    return next((by for by in found if by is not None), None)


def _balanced(lengths: Int64s, loads: Floats, count: int, room: int, few: int) -> Int64s | None:
    """Equal tokens, nearly equal loads; None where no exact fit was found."""
    order = np.lexsort((np.arange(len(lengths)), -lengths, -loads))
    # Every other of the lighter documents, until they are enough.
    is_pool = np.zeros(len(order), dtype=bool)
    is_pool[len(order) // 3 :: 2] = True
    is_pool[np.flatnonzero(is_pool)[: -_POOL * count]] = False
    heavy, pool = order[~is_pool], order[is_pool].tolist()
    # Less could not be filled exactly.
    mean = float(lengths[pool].mean()) if pool else 0.0
    reserve = min(few, len(pool) / (2 * count)) * mean
    rooms, filled = [room] * count, [0.0] * count
    chosen = np.full(len(lengths), -1, dtype=np.int64)
    for document in heavy.tolist():
        length = int(lengths[document])
        open_ones = [n for n in range(count) if rooms[n] - length >= reserve]
        if not open_ones:
            return None
        number = min(open_ones, key=lambda n: (filled[n], n))
        chosen[document] = number
        rooms[number] -= length
        filled[number] += float(loads[document])
    # The heaviest first, so that they get what is lightest a token: the longest come first.
    for number in sorted(range(count), key=lambda n: (filled[n], n))[:-1]:
        fit = _exact_fit(lengths, pool, rooms[number], few)
        if fit is None:
            return None
        chosen[fit] = number
        taken = set(fit)
        pool = [document for document in pool if document not in taken]
    chosen[chosen < 0] = max(range(count), key=lambda n: (filled[n], n))
    return chosen


def _exact_fit(lengths: Int64s, pool: list[int], room: int, few: int) -> list[int] | None:
    """Documents of the pool (the longest first) whose tokens are exactly `room`."""
    taken: list[int] = []
    rest = few * int(lengths[pool].mean()) if pool else 0
    for document in pool:
        length = int(lengths[document])
        if room - length >= rest:
            taken.append(document)
            room -= length
    skip = set(taken)
    left = [document for document in pool if document not in skip]
    # Different lengths reach more sums than the shortest alone.
    candidates = left[:: -(-len(left) // _EXACT) or 1]
    reachable = [1]
    within = (1 << (room + 1)) - 1
    for document in candidates:
        reachable.append((reachable[-1] | reachable[-1] << int(lengths[document])) & within)
    if not reachable[-1] >> room & 1:
        return None
    for step in range(len(candidates), 0, -1):
        if not reachable[step - 1] >> room & 1:
            taken.append(candidates[step - 1])
            room -= int(lengths[candidates[step - 1]])
    return taken
