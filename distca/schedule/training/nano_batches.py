"""A micro-batch as two nano-batches, *ping* and *pong*: one computes while the other communicates.

Both have the same number of tokens (paper, Section 4.1). Documents stay whole in one of them if
possible; at most one is cut in two, and its queries in pong see its keys in ping. Pong's plan then
has the whole document, with its tokens in ping as the cached prefix (`Plan.cached_prefix`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan import Placement, Plan, Tasks
from distca.plan.span import Floats, Int64s
from distca.schedule.training.micro_batches import whole_documents


@dataclass(frozen=True)
class Half:
    """Documents, or parts of them, that are in a nano-batch.

    Attributes:
        document: numbers of the documents in the micro-batch, int64 `[pieces]`.
        start: first token of each document in the nano-batch, int64 `[pieces]`.
        end: end of these tokens, int64 `[pieces]`.
    """

    document: Int64s
    start: Int64s
    end: Int64s


def split_in_two(lengths: Int64s, loads: Floats) -> tuple[Half, Half]:
    """Halves a micro-batch's documents, with equal tokens and nearly equal loads.

    Args:
        lengths: tokens of each document, int64 `[documents]`; an even number in all.
        loads: load of each document, `[documents]`.

    Returns:
        Ping and pong. A document that is in both is the last of ping and the first of pong, and
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
    remaining, filled = [tokens // 2, tokens // 2], [0.0, 0.0]
    members: list[list[int]] = [[], []]
    order = np.lexsort((np.arange(len(lengths)), -loads)).tolist()
    crossing = None
    for document in order:
        length = int(lengths[document])
        able = [n for n in (0, 1) if remaining[n] >= length]
        if able:
            number = min(able, key=lambda n: (filled[n], n))
            members[number].append(document)
            remaining[number] -= length
            filled[number] += float(loads[document])
        else:
            # Ping is full afterwards, and all documents that follow fit into pong.
            crossing = (document, remaining[0])
            remaining = [0, remaining[1] - (length - remaining[0])]
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
        document: number of the document in pong's plan, in which it begins at the cut.
        earlier: placement of its tokens before the cut; the `document` column is ignored.
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
        plan: plan in which the crossing document begins at the cut.
        crossing: document whose first tokens are in the nano-batch before; None: there is none.
    """

    plan: Plan
    crossing: Crossing | None = None


def plan_halves(
    lengths: Int64s, loads: Floats, plan: Callable[[Int64s], Plan]
) -> tuple[tuple[Half, Half], tuple[NanoPlan, NanoPlan]]:
    """Halves a micro-batch and plans both halves.

    Args:
        lengths: tokens of each document, int64 `[documents]`; an even number in all.
        loads: load of each document, `[documents]`.
        plan: function that makes a plan for documents of given lengths.

    Raises:
        ValueError: the number of tokens is odd.
    """
    halves = split_in_two(lengths, loads)
    ping, pong = (plan(half.end - half.start) for half in halves)
    crossing = None
    if len(halves[1].start) and halves[1].start[0] > 0:
        # The crossing document is the last of ping and the first of pong.
        earlier = ping.placement.select(ping.placement.document == len(ping.lengths) - 1)
        crossing = Crossing(0, earlier)
    return halves, (NanoPlan(ping), NanoPlan(pong, crossing))


def with_cached_prefixes(plan: Plan, crossings: Sequence[Crossing]) -> Plan:
    """Adds to pong's plan the keys that its crossing documents have in ping, as cached prefixes.

    Owners compute their queries over these keys; a scheduler that balances moves some tasks to
    other servers. On every rank ping's keys follow pong's own, which is the order in the layers.

    Args:
        plan: plan of pong's documents, in which crossing ones begin at the cut.
        crossings: documents that cross.
    """
    if not crossings:
        return plan
    cut = np.zeros_like(plan.lengths)
    for crossing in crossings:
        cut[crossing.document] = crossing.cut
    placement, tasks, mask = plan.placement, plan.tasks, plan.mask
    placement = replace(
        placement,
        start=placement.start + cut[placement.document],
        end=placement.end + cut[placement.document],
    )
    moved = cut[tasks.document]
    tasks = Tasks(
        tasks.document,
        tasks.q_start + moved,
        tasks.q_end + moved,
        tasks.kv_start + moved,
        tasks.kv_end + moved,
        tasks.server,
    )
    crosses = cut[placement.document] > 0
    home = placement.select(crosses)
    if mask.window_left is None:
        seen_first, seen_end = np.zeros_like(home.start), cut[home.document]
    else:
        # Keys that a window sees before the cut are no rectangle: these pieces stay whole, at home.
        tasks = tasks[cut[tasks.document] == 0]
        seen_first, seen_end = mask.first_key(home.start), home.end
    more = Tasks(home.document, home.start, home.end, seen_first, seen_end, home.rank)
    earlier = [
        replace(c.earlier, document=np.full_like(c.earlier.document, c.document)) for c in crossings
    ]
    return replace(
        plan,
        lengths=plan.lengths + cut,
        placement=Placement.concatenate([placement, *earlier]),
        tasks=Tasks.concatenate([tasks, more]),
        cached_prefix=cut,
    )
