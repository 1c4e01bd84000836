"""Chains: micro-batches in turn that share documents, which may so be longer than a micro-batch.

The documents of a chain lie one after the other, the longest first, and every micro-batch has the
next tokens. So at most one document crosses the bounds of a micro-batch on either side, and if it
does not fit, it goes on in the next one: its queries there see its keys in the micro-batches before
as a cached prefix, as pong's see those in ping. Where all documents fit they stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan import Placement, Plan
from distca.plan.span import Floats, Int64s
from distca.schedule.training.micro_batches import whole_documents
from distca.schedule.training.nano_batches import (
    DocumentParts,
    NanoPlan,
    SplitDocument,
    split_in_two,
)

Loads = Callable[[Int64s, Int64s], Floats]
"""Loads of the tokens of documents between two positions each, `[pieces]`."""


def cut_chain(lengths: Int64s, loads: Loads, count: int, in_turn: bool) -> list[DocumentParts]:
    """Cuts the documents of a chain into micro-batches of equally many tokens.

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
    return NanoPlan(plan, tuple(split_documents), borrows, borrows_from_ping, lent)
