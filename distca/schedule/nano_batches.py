"""A micro-batch as two nano-batches, *ping* and *pong*: one computes while the other communicates.

Both have the same number of tokens (paper, Section 4.1). Documents stay whole in one of them where
they can; at most one is cut in two, whose queries in pong see its keys in ping. Pong's plan then
holds the whole document, but for the queries that ping has (`Plan.first_query`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan import Placement, Plan, Tasks
from distca.plan.span import Floats, Int64s
from distca.schedule.micro_batches import whole_documents


@dataclass(frozen=True)
class Half:
    """The documents of a nano-batch.

    Attributes:
        document: which documents of the micro-batch, int64 `[pieces]`.
        start: the first token of each that is in it, int64 `[pieces]`.
        end: one after the last.
    """

    document: Int64s
    start: Int64s
    end: Int64s


def split_in_two(lengths: Int64s, loads: Floats) -> tuple[Half, Half]:
    """Two halves of a micro-batch's documents with equally many tokens and nearly equal loads.

    Args:
        lengths: tokens of each document, int64 `[documents]`; an even number in all.
        loads: of each document, `[documents]`.

    Returns:
        Ping and pong. If a document is in both, it is the last of ping and the first of pong, and
        ping has its first tokens.

    Raises:
        ValueError: the number of tokens is odd.
    """
    tokens = int(lengths.sum())
    if tokens % 2:
        raise ValueError(f"{tokens} tokens cannot be halved: use an even number")
    whole = whole_documents(lengths, loads, 2, tokens // 2)
    if whole is not None:
        first, second = (np.flatnonzero(whole == number) for number in (0, 1))
        return _whole(first, lengths), _whole(second, lengths)
    rooms, filled = [tokens // 2, tokens // 2], [0.0, 0.0]
    members: list[list[int]] = [[], []]
    order = np.lexsort((np.arange(len(lengths)), -loads)).tolist()
    crossing = None
    for document in order:
        length = int(lengths[document])
        able = [n for n in (0, 1) if rooms[n] >= length]
        if able:
            number = min(able, key=lambda n: (filled[n], n))
            members[number].append(document)
            rooms[number] -= length
            filled[number] += float(loads[document])
        else:
            # Ping is full then, and all that follow fit into pong.
            crossing = (document, rooms[0])
            rooms = [0, rooms[1] - (length - rooms[0])]
    halves = [_whole(np.array(sorted(m), dtype=np.int64), lengths) for m in members]
    if crossing is None:
        return halves[0], halves[1]
    document, cut = crossing
    ping, pong = halves
    return (
        Half(*(np.append(a, b) for a, b in zip(_columns(ping), (document, 0, cut), strict=True))),
        Half(
            *(
                np.append(b, a)
                for a, b in zip(
                    _columns(pong), (document, cut, int(lengths[document])), strict=True
                )
            )
        ),
    )


def _whole(documents: Int64s, lengths: Int64s) -> Half:
    return Half(documents, np.zeros_like(documents), lengths[documents])


def _columns(half: Half) -> tuple[Int64s, Int64s, Int64s]:
    return half.document, half.start, half.end


@dataclass(frozen=True)
class Crossing:
    """A document of pong's plan whose first tokens are in ping.

    Attributes:
        document: its number in pong's plan, where it begins at the cut.
        earlier: who owns the tokens before the cut; its `document` column does not matter.
    """

    document: int
    earlier: Placement

    @property
    def cut(self) -> int:
        """The first token that is not in ping."""
        return int(self.earlier.end.max())


@dataclass(frozen=True)
class NanoPlan:
    """A nano-batch's plan on the ranks of its stage.

    Attributes:
        plan: as if the crossing document began at the cut.
        crossing: the document whose first tokens are in the nano-batch before; None: none.
    """

    plan: Plan
    crossing: Crossing | None = None


def plan_halves(
    lengths: Int64s, loads: Floats, plan: Callable[[Int64s], Plan]
) -> tuple[tuple[Half, Half], tuple[NanoPlan, NanoPlan]]:
    """A micro-batch's two halves, and a plan of each.

    Args:
        lengths: tokens of each document, int64 `[documents]`; an even number in all.
        loads: of each document, `[documents]`.
        plan: of documents of such lengths.

    Raises:
        ValueError: the number of tokens is odd.
    """
    halves = split_in_two(lengths, loads)
    ping, pong = (plan(half.end - half.start) for half in halves)
    crossing = None
    if len(halves[1].start) and halves[1].start[0] > 0:
        # It is the last of ping and the first of pong.
        earlier = ping.placement.select(ping.placement.document == len(ping.lengths) - 1)
        crossing = Crossing(0, earlier)
    return halves, (NanoPlan(ping), NanoPlan(pong, crossing))


def with_earlier_keys(plan: Plan, crossings: Sequence[Crossing]) -> Plan:
    """Pong's plan with the keys that its crossing documents have in ping.

    The queries see these keys at home; a scheduler that balances moves some of it elsewhere.

    Args:
        plan: of pong's documents as if they began at the cut.
        crossings: documents that do not.
    """
    if not crossings:
        return plan
    cut = np.zeros_like(plan.lengths)
    for crossing in crossings:
        cut[crossing.document] = crossing.cut
    at, tasks, mask = plan.placement, plan.tasks, plan.mask
    at = replace(at, start=at.start + cut[at.document], end=at.end + cut[at.document])
    moved = cut[tasks.document]
    tasks = Tasks(
        tasks.document,
        tasks.q_start + moved,
        tasks.q_end + moved,
        tasks.kv_start + moved,
        tasks.kv_end + moved,
        tasks.server,
    )
    crosses = cut[at.document] > 0
    home = at.select(crosses)
    if mask.window_left is None:
        seen_first, seen_end = np.zeros_like(home.start), cut[home.document]
    else:
        # A window reaches back across the cut in no rectangle: these pieces stay whole, at home.
        tasks = tasks[cut[tasks.document] == 0]
        seen_first, seen_end = mask.first_key(home.start), home.end
    more = Tasks(home.document, home.start, home.end, seen_first, seen_end, home.rank)
    earlier = [
        replace(c.earlier, document=np.full_like(c.earlier.document, c.document)) for c in crossings
    ]
    return replace(
        plan,
        lengths=plan.lengths + cut,
        placement=Placement.concatenate([at, *earlier]),
        tasks=Tasks.concatenate([tasks, more]),
        first_query=cut,
    )
