"""Checks that ranks ask NCCL for the same things in the same order; else they wait for each other.

NCCL's communicators must be used in one order by all of their ranks, also two communicators that
share ranks: a kernel that waits for a peer takes the place of one that the peer waits for. A send
outside of a group waits for its receive, so two ranks that both send first never receive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, groupby
from typing import NamedTuple


class Call(NamedTuple):
    """What a rank asked a communicator for.

    Attributes:
        group: name of the communicator, which all of its ranks have.
        members: its processes, by a number that is theirs alone.
        kind: name of the collective, `send` or `recv`; `create`: the communicator is made.
        peer: process of the other side of a send or a receive; 0: all members take part.
        size: bytes.
        batch: number of the group of sends and receives that it is part of; 0: it is alone.
        place: where it is asked for.
    """

    group: str
    members: tuple[int, ...]
    kind: str
    peer: int
    size: int
    batch: int
    place: str


_Matched = tuple[str, str, int]
"""Communicator, kind as the first rank of a pair has it, and bytes, or 0 where they may differ."""

_MIRRORED = {"send": "recv", "recv": "send"}
_RAGGED = ("alltoall", "scatter", "create")
"""Kinds of collectives whose size may differ between ranks."""


def out_of_order(calls: Mapping[int, Sequence[Call]]) -> list[str]:
    """Returns what ranks ask for in different orders, with both places.

    Args:
        calls: calls of each process, in order.
    """
    found = []
    for one, other in combinations(sorted(calls), 2):
        told = _first_difference(calls[one], calls[other], one, other)
        if told is not None:
            found.append(told)
    return found


def _first_difference(
    mine: Sequence[Call], theirs: Sequence[Call], me: int, them: int
) -> str | None:
    ours = _units(mine, them, mirrored=False), _units(theirs, me, mirrored=True)
    left: tuple[dict[_Matched, list[Call]], ...] = ({}, {})
    while True:
        for units, waiting in zip(ours, left, strict=True):
            if not waiting:
                waiting.update(next(units, {}))
        if not any(left):
            return None
        common = left[0].keys() & left[1].keys()
        if not common:
            told = [_told(waiting) for waiting in left]
            return f"process {me} asks for {told[0]}; process {them} asks for {told[1]}"
        for key in common:
            for waiting in left:
                waiting[key].pop()
                if not waiting[key]:
                    del waiting[key]


def _units(
    calls: Sequence[Call], peer: int, mirrored: bool
) -> Iterator[dict[_Matched, list[Call]]]:
    """Yields what is asked for at once and has a peer in it."""
    shared = [
        each for each in calls if each.peer == peer or (not each.peer and peer in each.members)
    ]
    # Calls of a batch are next to each other; those that are alone have no number in common.
    numbered = enumerate(shared)
    for _, unit in groupby(numbered, lambda each: each[1].batch or -1 - each[0]):
        found: dict[_Matched, list[Call]] = {}
        for _, call in unit:
            kind = _MIRRORED.get(call.kind, call.kind) if mirrored else call.kind
            size = 0 if call.kind in _RAGGED else call.size
            found.setdefault((call.group, kind, size), []).append(call)
        yield found


def _told(waiting: Mapping[_Matched, Sequence[Call]]) -> str:
    if not waiting:
        return "nothing more"
    calls = Counter(call for each in waiting.values() for call in each)
    return ", ".join(
        f"{call.kind} of {call.size} bytes of {call.group} at {call.place}" for call in calls
    )
