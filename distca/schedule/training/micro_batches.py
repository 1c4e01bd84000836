"""Sharing the documents of a global batch out over its micro-batches, so that loads are equal.

Micro-batches follow each other, so without pipeline stages only the sum of their loads counts; but
stages work on different micro-batches at the same time, and a long document has fewer short ones
beside it to fill ranks with if it is alone in its micro-batch. All micro-batches must have exactly
the same number of tokens, and every document stays whole: a partition problem, for which exact
solutions are found because short documents are many.

1. Documents in the order of their load, the heaviest first, go to the micro-batch with the least
   load that has room; every other light document (`_RESERVE` for each micro-batch) is kept in
   reserve.
2. Each micro-batch in turn is filled up: with the longest of the reserve, until its room is worth a
   few documents, then with a subset of the reserve that fits exactly. The sums that subsets reach
   are a set of bits, which adding a document shifts (the dynamic program for subset sums, with
   Python's long integers as bit sets). The last micro-batch gets the rest, which fits by itself.

If no exact fit is found, or it gains too little, documents stay in the windows of the stream.

Micro-batches in turn may share documents as a *chain*: these may be longer than a micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca.plan.span import Floats, Int64s

_RESERVE = 48
"""Short documents kept in the reserve for each micro-batch, to fit its tokens exactly."""
_FEW = (20, 8, 3)
"""Room that is left to be filled exactly, in mean documents of the reserve: fewer if that fails."""
_EXACT = 96
"""Documents among which the subset that fits exactly is searched for."""
_LEAST_GAIN = 0.01
"""Least gain of the heaviest micro-batch, as a part of the mean load."""


@dataclass(frozen=True)
class DocumentParts:
    """Documents, or parts of them, that are in a nano-batch, or in a micro-batch of a chain.

    Attributes:
        document: numbers of the documents in the micro-batch, or in the chain, int64 `[pieces]`.
        start: first token of each document that is there, int64 `[pieces]`.
        end: end of these tokens, int64 `[pieces]`.
    """

    document: Int64s
    start: Int64s
    end: Int64s

    @property
    def lengths(self) -> Int64s:
        return self.end - self.start


Loads = Callable[[Int64s, Int64s], Floats]
"""Loads of the tokens of documents between two positions each, `[pieces]`."""


def share_out(lengths: Int64s, loads: Floats, windows: Int64s) -> Int64s:
    """Returns the micro-batch of each document, int64 `[documents]`, for nearly equal loads.

    Args:
        lengths: tokens of each document, int64 `[documents]`.
        loads: load of each document, `[documents]`.
        windows: micro-batch of each document in the stream, int64 `[documents]`. All have the same
            number of tokens, as do those that are returned.
    """
    count = int(windows.max(initial=0)) + 1
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
    """Groups whole documents, with equal tokens and nearly equal loads.

    Args:
        lengths: tokens of each document, int64 `[documents]`; `count * room` in all.
        loads: load of each document, `[documents]`.
        count: number of groups.
        room: tokens of a group.

    Returns:
        The group of each document, int64 `[documents]`; None if no exact fit is found.
    """
    found = (_balanced(lengths, loads, count, room, few) for few in _FEW)
    return next((by for by in found if by is not None), None)


def cut_chain(lengths: Int64s, loads: Loads, count: int, in_turn: bool) -> list[DocumentParts]:
    """Cuts the documents of a chain into micro-batches of equally many tokens.

    Where all documents fit they stay whole. Otherwise they lie one after the other, the longest
    first, and every micro-batch has the next tokens: at most one document crosses either bound of a
    micro-batch. Its queries see its keys in the micro-batches before as a cached prefix, as pong's
    see those in ping.

    Args:
        lengths: tokens of each document, int64 `[documents]`; `count` divides their sum.
        loads: loads of parts of documents.
        count: number of micro-batches.
        in_turn: whether documents stay in their order.
    """
    tokens = int(lengths.sum()) // count
    zeros = np.zeros_like(lengths)
    if count > 1 and not in_turn:
        group = whole_documents(lengths, loads(zeros, lengths), count, tokens)
        if group is not None:
            members = [np.flatnonzero(group == number) for number in range(count)]
            return [DocumentParts(each, zeros[each], lengths[each]) for each in members]
    numbers = np.arange(len(lengths))
    order = numbers if in_turn or count == 1 else np.lexsort((numbers, -lengths))
    begins = np.cumsum(lengths[order]) - lengths[order]
    found = []
    for first in range(0, count * tokens, tokens):
        start = np.clip(first - begins, 0, lengths[order])
        end = np.clip(first + tokens - begins, 0, lengths[order])
        there = end > start
        found.append(DocumentParts(order[there], start[there], end[there]))
    return found


def _balanced(lengths: Int64s, loads: Floats, count: int, room: int, few: int) -> Int64s | None:
    """Groups documents as `whole_documents` does; about `few` of them in a group fit exactly."""
    order = np.lexsort((np.arange(len(lengths)), -lengths, -loads))
    # The reserve: every other of the lighter documents, as many as are needed.
    is_reserve = np.zeros(len(order), dtype=bool)
    is_reserve[len(order) // 3 :: 2] = True
    is_reserve[np.flatnonzero(is_reserve)[: -_RESERVE * count]] = False
    heavy, reserve = order[~is_reserve], order[is_reserve].tolist()
    # Room that is left in a group, since less could not be filled exactly.
    mean = float(lengths[reserve].mean()) if reserve else 0.0
    kept_free = min(few, len(reserve) / (2 * count)) * mean
    remaining = [room] * count
    # A heap of the groups by their load.
    by_load = [(0.0, number) for number in range(count)]
    chosen = np.full(len(lengths), -1, dtype=np.int64)
    taken_by = []
    for length, load in zip(lengths[heavy].tolist(), loads[heavy].tolist(), strict=True):
        set_aside = []
        while by_load and remaining[by_load[0][1]] - length < kept_free:
            set_aside.append(heapq.heappop(by_load))
        if not by_load:
            return None
        filled, number = by_load[0]
        heapq.heapreplace(by_load, (filled + load, number))
        taken_by.append(number)
        remaining[number] -= length
        for entry in set_aside:
            heapq.heappush(by_load, entry)
    chosen[heavy] = taken_by
    # The lightest group first, as the longest documents of the reserve have most load a token.
    *first, last = [number for _, number in sorted(by_load)]
    for number in first:
        fit = _exact_fit(lengths, reserve, remaining[number], few)
        if fit is None:
            return None
        chosen[fit] = number
        taken = set(fit)
        reserve = [document for document in reserve if document not in taken]
    chosen[chosen < 0] = last
    return chosen


def _exact_fit(lengths: Int64s, reserve: list[int], room: int, few: int) -> list[int] | None:
    """Finds documents of the reserve, sorted from the longest, whose tokens are exactly `room`."""
    taken: list[int] = []
    rest = few * int(lengths[reserve].mean()) if reserve else 0
    for document in reserve:
        length = int(lengths[document])
        if room - length >= rest:
            taken.append(document)
            room -= length
    skip = set(taken)
    left = [document for document in reserve if document not in skip]
    # A spread of lengths reaches more sums than the shortest documents alone.
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
