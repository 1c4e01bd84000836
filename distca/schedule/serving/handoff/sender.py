"""Prefill side of the hand-off, as `protocol` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distca.schedule.serving.handoff.protocol import (
    Abort,
    Action,
    Beat,
    Begin,
    Cancel,
    Computed,
    Drained,
    Fence,
    Fenced,
    Free,
    Received,
    Send,
    SenderEvent,
    Tick,
    Transfer,
    Write,
    Written,
)

Bits = tuple[int, ...]
"""Layers, as bits, by chunk."""


@dataclass(frozen=True)
class Outgoing:
    """A request whose keys and values are computed and sent.

    Attributes:
        begun: its size.
        heard: when the decode side was last heard of.
        issued: layers whose writing began.
        written: layers whose writing ended.
        received: chunks that the decode side has, as bits.
        ending: why the transfer ends early; empty while it doesn't.
        fencing: the decode side counts as dead, and the channel is being closed.
    """

    begun: Begin
    heard: float
    issued: Bits
    written: Bits
    received: int = 0
    ending: str = ""
    fencing: bool = False


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
    if isinstance(event, Tick):
        return _tick(state, now)
    transfer = event.transfer
    known = state.outgoing.get(transfer)
    if isinstance(event, Begin):
        nothing = (0,) * event.chunks
        begun = Outgoing(event, now, nothing, nothing)
        return state if known is not None else _with(state, transfer, begun), []
    if known is None:
        # What has ended here, or never began, has no write under way.
        return state, [Send(Drained(transfer))] if isinstance(event, Abort) else []
    actions: list[Action] = []
    match event:
        case Received() | Abort() | Beat():
            known = replace(known, heard=now)
    match event:
        case Computed(_, chunk, layer) if not known.ending:
            known = replace(known, issued=_set(known.issued, chunk, layer))
            actions.append(Write(transfer, chunk, layer))
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
    outgoing = {each: known for each, known in state.outgoing.items() if each != transfer}
    return replace(state, outgoing=outgoing), [Free(transfer, reason)]


def _set(bits: Bits, chunk: int, layer: int) -> Bits:
    return (*bits[:chunk], bits[chunk] | 1 << layer, *bits[chunk + 1 :])


def _with(state: Sender, transfer: Transfer, outgoing: Outgoing) -> Sender:
    return replace(state, outgoing={**state.outgoing, transfer: outgoing})
