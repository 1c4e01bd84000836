"""A micro-batch as two nano-batches, *ping* and *pong*: one computes while the other communicates.

Both have the same number of tokens (paper, Section 4.1). Documents stay whole in one of them if
possible; at most one is cut in two, and its queries in pong see its keys in ping. Pong's plan then
has the whole document, with its tokens in ping as the cached prefix (`Plan.cached_prefix`). So has
the plan of a later micro-batch of a chain that goes on with a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan import Mask, Placement, Plan, Tasks
from distca.plan.span import Floats, Int64s
from distca.schedule.base import tasks_at_home
from distca.schedule.training.micro_batches import DocumentParts, Loads, whole_documents


def split_in_two(lengths: Int64s, loads: Floats) -> tuple[DocumentParts, DocumentParts]:
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
        DocumentParts(
            *(np.append(a, b) for a, b in zip(_columns(ping), (document, 0, cut), strict=True))
        ),
        DocumentParts(
            *(
                np.append(b, a)
                for a, b in zip(
                    _columns(pong), (document, cut, int(lengths[document])), strict=True
                )
            )
        ),
    )


def _whole(documents: Int64s, lengths: Int64s) -> DocumentParts:
    return DocumentParts(documents, np.zeros_like(documents), lengths[documents])


def _columns(half: DocumentParts) -> tuple[Int64s, Int64s, Int64s]:
    return half.document, half.start, half.end


@dataclass(frozen=True)
class SplitDocument:
    """A document of a plan whose first tokens are in earlier nano-batches.

    Attributes:
        document: number of the document in the plan, in which it begins at the cut.
        earlier: placement of its tokens before the cut; the `document` column is ignored.
    """

    document: int
    earlier: Placement

    @property
    def cut(self) -> int:
        """The first token that is in no earlier nano-batch."""
        return int(self.earlier.end.max())


@dataclass(frozen=True)
class NanoPlan:
    """A nano-batch's plan on the ranks of its stage.

    Attributes:
        plan: plan in which split documents begin at the cut.
        split_documents: documents whose first tokens are in earlier nano-batches: first the one
            that began in an earlier micro-batch, then the one that begins in ping, if there are
            any.
        borrows: nano-batches of earlier micro-batches that have tokens of the first of these
            documents: their micro-batches in the chain and their numbers, in the order in which
            `SplitDocument.earlier` has their tokens. Ping's follow.
        borrows_from_ping: whether pong continues ping's last document.
        from_ping: of trees, who owns ping's tokens that pong has as a cached prefix: pieces of
            ping's plan, or None.
        lends: number of the document with which a later micro-batch goes on, or None.
    """

    plan: Plan
    split_documents: tuple[SplitDocument, ...] = ()
    borrows: tuple[tuple[int, int], ...] = ()
    borrows_from_ping: bool = False
    from_ping: Placement | None = None
    lends: int | None = None

    @property
    def first_positions(self) -> Int64s:
        """Position of each document's first token here in the whole document, `[documents]`."""
        positions = np.zeros_like(self.plan.lengths)
        for split in self.split_documents:
            positions[split.document] = split.cut
        return positions


def with_cached_prefixes(plan: Plan, split_documents: Sequence[SplitDocument]) -> Plan:
    """Adds the keys that split documents have in earlier nano-batches, as cached prefixes.

    Owners compute their queries over these keys; a scheduler that balances moves some tasks to
    other servers. On every rank they follow the plan's own keys, which is the order in the layers.

    Args:
        plan: plan of a nano-batch's documents, in which split ones begin at the cut.
        split_documents: documents whose first tokens are in earlier nano-batches.
    """
    if not split_documents:
        return plan
    cut = np.zeros_like(plan.lengths)
    for split in split_documents:
        cut[split.document] = split.cut
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
    if mask == Mask():
        first = np.zeros_like(home.start)
        more = Tasks(home.document, home.start, home.end, first, cut[home.document], home.rank)
    else:
        # Keys that a window sees before the cut are no rectangle, and chunks do not begin at the
        # cut: these pieces stay whole, at home.
        tasks = tasks[cut[tasks.document] == 0]
        more = tasks_at_home(home, mask)
    earlier = [
        replace(c.earlier, document=np.full_like(c.earlier.document, c.document))
        for c in split_documents
    ]
    return replace(
        plan,
        lengths=plan.lengths + cut,
        placement=Placement.concatenate([placement, *earlier]),
        tasks=Tasks.concatenate([tasks, more]),
        cached_prefix=cut,
    )


@dataclass(frozen=True)
class _Part:
    """Tokens of one document in a nano-batch: where they lie, and in which nano-batch.

    Attributes:
        micro_batch: number of the micro-batch in the chain.
        nano_batch: number of the nano-batch in the micro-batch.
        placement: placement of the tokens, by their position in the document.
    """

    micro_batch: int
    nano_batch: int
    placement: Placement


def plan_chain(
    micro_batches: Sequence[DocumentParts],
    lengths: Int64s,
    loads: Loads,
    plan: Callable[[Int64s], Plan],
    ping_pong: bool,
) -> list[tuple[tuple[DocumentParts, ...], tuple[NanoPlan, ...]]]:
    """Plans the nano-batches of a chain's micro-batches.

    Args:
        micro_batches: documents of each micro-batch; several are in the order of `cut_chain`.
        lengths: tokens of each document of the chain, int64 `[documents]`.
        loads: loads of parts of documents.
        plan: function that makes a plan for documents of given lengths.
        ping_pong: whether micro-batches are halved.

    Returns:
        Of each micro-batch its nano-batches' pieces of the chain's documents, and their plans.

    Raises:
        ValueError: a micro-batch that is to be halved has an odd number of tokens.
    """
    found = []
    parts: dict[int, list[_Part]] = {}
    for number, pieces in enumerate(micro_batches):
        nano_batches: tuple[DocumentParts, ...] = (pieces,)
        if ping_pong:
            halves = split_in_two(pieces.lengths, loads(pieces.start, pieces.end))
            nano_batches = tuple(
                DocumentParts(
                    pieces.document[half.document],
                    pieces.start[half.document] + half.start,
                    pieces.start[half.document] + half.end,
                )
                for half in halves
            )
        plans = []
        for nano_number, nano in enumerate(nano_batches):
            own = plan(nano.lengths)
            plans.append(_nano_plan(own, nano, lengths, parts, (number, nano_number), pieces))
        found.append((nano_batches, tuple(plans)))
    return found


def _nano_plan(
    plan: Plan,
    nano: DocumentParts,
    lengths: Int64s,
    parts: dict[int, list[_Part]],
    place: tuple[int, int],
    micro_batch: DocumentParts,
) -> NanoPlan:
    """Adds to a nano-batch's plan what it borrows and lends, and notes its parts of documents."""
    micro, number = place
    split_documents: list[SplitDocument] = []
    borrows: tuple[tuple[int, int], ...] = ()
    borrows_from_ping = False
    # Those of earlier micro-batches first.
    crossing = np.flatnonzero(nano.start > 0).tolist()
    for piece in sorted(crossing, key=lambda n: parts[int(nano.document[n])][0].micro_batch):
        before = parts[int(nano.document[piece])]
        split_documents.append(
            SplitDocument(piece, Placement.concatenate([part.placement for part in before]))
        )
        borrows += tuple((p.micro_batch, p.nano_batch) for p in before if p.micro_batch < micro)
        borrows_from_ping |= before[-1].micro_batch == micro
    # The last tokens of the document in this micro-batch are not its last ones.
    last = dict(zip(micro_batch.document.tolist(), micro_batch.end.tolist(), strict=True))
    lent = None
    for piece, document in enumerate(nano.document.tolist()):
        goes_on = last[document] < lengths[document]
        if goes_on:
            assert lent is None, "two documents cross the end of a micro-batch"
            lent = piece
        if goes_on or nano.end[piece] < last[document]:
            own = plan.placement.select(plan.placement.document == piece)
            start = int(nano.start[piece])
            shifted = Placement(
                own.document, own.start + start, own.end + start, own.rank, own.world_size
            )
            parts.setdefault(document, []).append(_Part(micro, number, shifted))
    return NanoPlan(plan, tuple(split_documents), borrows, borrows_from_ping, lends=lent)
