"""Prefill side of the hand-off, as `protocol` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from distca.schedule.serving.handoff.protocol import (
    Abort,
    Action,
    Beat,
    Begin,
    Cancel,
    Computed,
    Dispatched,
    Drained,
    Fence,
    Fenced,
    Free,
    Grant,
    Offer,
    Received,
    Send,
    SenderEvent,
    Tick,
    Transfer,
    Write,
    Written,
)

Bits = tuple[int, ...]


@dataclass(frozen=True)
class Outgoing:
    """A request whose keys and values are computed and sent.

    Attributes:
        begun: its size.
        heard: when the decode side was last heard of.
        computed: layers that are computed, as bits, by chunk.
        issued: layers whose writing began, likewise.
        written: layers whose writing ended, likewise.
        offered: chunks that were offered, as bits.
        granted: chunks that may be written, likewise.
        received: chunks that the decode side has, likewise.
        ending: why the transfer ends early; empty while it doesn't.
        fencing: the decode side counts as dead, and the channel is being closed.
    """

    begun: Begin
    heard: float
    computed: Bits
    issued: Bits
    written: Bits
    offered: int = 0
    granted: int = 0
    received: int = 0
    ending: str = ""
    fencing: bool = False

    def state_of(self, chunk: int) -> Literal["planned", "offered", "granted", "sent", "acked"]:
        """Returns where a chunk is."""
        if self.received >> chunk & 1:
            return "acked"
        if self.issued[chunk] == (1 << self.begun.layers) - 1:
            return "sent"
        if self.granted >> chunk & 1:
            return "granted"
        return "offered" if self.offered >> chunk & 1 else "planned"


@dataclass(frozen=True)
class Sender:
    """State of a prefill side.

    Attributes:
        lease: seconds without a word after which a decode rank counts as dead.
        outgoing: requests.
    """

    lease: float
    outgoing: Mapping[Transfer, Outgoing] = field(default_factory=dict)


def send(state: Sender, event: SenderEvent, now: float) -> tuple[Sender, list[Action]]:
    """Applies an event to a prefill side.

    Args:
        state: before the event.
        event: an event of its own, or a message from the decode side.
        now: seconds on the prefill side's clock.

    Returns:
        The state after it, and what is to be done, in this order.
    """
    match event:
        case Tick():
            return _tick(state, now)
        case Begin(transfer, chunks):
            if transfer in state.outgoing:
                return state, []
            nothing = (0,) * chunks
            return _with(state, transfer, Outgoing(event, now, nothing, nothing, nothing)), []
    transfer = event.transfer
    known = state.outgoing.get(transfer)
    if known is None:
        # What has ended here, or never began, has no write under way.
        return state, [Send(Drained(transfer))] if isinstance(event, Abort) else []
    actions: list[Action] = []
    match event:
        case Grant() | Received() | Abort() | Beat():
            known = replace(known, heard=now)
    match event:
        case Dispatched(_, chunk) if not known.ending:
            known = replace(known, offered=known.offered | 1 << chunk)
            actions.append(Send(Offer(transfer, chunk)))
        case Computed(_, chunk, layer) if not known.ending:
            known = replace(known, computed=_set(known.computed, chunk, layer))
            known, actions = _issue(known, chunk)
        case Grant(_, chunk) if not known.ending:
            known = replace(known, granted=known.granted | 1 << chunk)
            known, actions = _issue(known, chunk)
        case Written(_, chunk, layer):
            known = replace(known, written=_set(known.written, chunk, layer))
        case Received(_, chunk):
            known = replace(known, received=known.received | 1 << chunk)
        case Cancel():
            known = replace(known, ending=known.ending or "cancelled")
        case Abort(_, reason):
            known = replace(known, ending=known.ending or reason)
        case Fenced() if known.fencing:
            known = replace(known, written=known.issued)
    state = _with(state, transfer, known)
    if not is_drained(known):
        return state, actions
    if known.received == (1 << known.begun.chunks) - 1:
        return _free(state, transfer, "")
    if known.ending:
        state, freed = _free(state, transfer, known.ending)
        return state, [Send(Drained(transfer)), *freed]
    return state, actions


def is_drained(outgoing: Outgoing) -> bool:
    """Returns whether no write is under way."""
    return outgoing.written == outgoing.issued


def _issue(outgoing: Outgoing, chunk: int) -> tuple[Outgoing, list[Action]]:
    """Writes the layers of a chunk that are computed and granted, and were not written before."""
    if not outgoing.granted >> chunk & 1:
        return outgoing, []
    new = outgoing.computed[chunk] & ~outgoing.issued[chunk]
    layers = [layer for layer in range(outgoing.begun.layers) if new >> layer & 1]
    for layer in layers:
        outgoing = replace(outgoing, issued=_set(outgoing.issued, chunk, layer))
    return outgoing, [Write(outgoing.begun.transfer, chunk, layer) for layer in layers]


def _tick(state: Sender, now: float) -> tuple[Sender, list[Action]]:
    actions: list[Action] = []
    for transfer, known in state.outgoing.items():
        if known.fencing:
            continue
        if now - known.heard > state.lease:
            ending = known.ending or "the decode side is silent"
            state = _with(state, transfer, replace(known, ending=ending, fencing=True))
            actions.append(Fence(transfer))
        else:
            actions.append(Send(Beat(transfer)))
    return state, actions


def _free(state: Sender, transfer: Transfer, reason: str) -> tuple[Sender, list[Action]]:
    """Frees a request's blocks, and forgets it."""
    outgoing = dict(state.outgoing)
    blocks = outgoing.pop(transfer).begun.blocks
    return replace(state, outgoing=outgoing), [Free(transfer, blocks, reason)]


def _set(bits: Bits, chunk: int, layer: int) -> Bits:
    return (*bits[:chunk], bits[chunk] | 1 << layer, *bits[chunk + 1 :])


def _with(state: Sender, transfer: Transfer, outgoing: Outgoing) -> Sender:
    return replace(state, outgoing={**state.outgoing, transfer: outgoing})
