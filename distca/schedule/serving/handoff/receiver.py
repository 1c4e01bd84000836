"""Decode side of the hand-off, as `protocol` describes it."""

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
    Drained,
    Fence,
    Fenced,
    Finish,
    Free,
    Grant,
    Landed,
    Offer,
    Received,
    ReceiverEvent,
    Send,
    Start,
    Started,
    Tick,
    Transfer,
)

Phase = Literal["reserved", "receiving", "ready", "running", "draining", "fencing"]


@dataclass(frozen=True)
class Incoming:
    """A request that is received, or decodes.

    Attributes:
        begun: its size.
        phase: where it is.
        heard: when the prefill side was last heard of.
        landed: layers that landed, as bits, by chunk.
        offered: chunks that were offered, as bits.
        granted: chunks that were granted, likewise.
        reason: why it is draining or fenced.
    """

    begun: Begin
    phase: Phase
    heard: float
    landed: tuple[int, ...]
    offered: int = 0
    granted: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Receiver:
    """State of a decode rank.

    Attributes:
        free_blocks: blocks of its pool that no request has.
        backends: requests that can be received at a time.
        lease: seconds without a word after which the prefill side counts as dead.
        incoming: requests.
        line: those that have offered and are not all here, by their first offers. The first
            `backends` of them have a backend each.
    """

    free_blocks: int
    backends: int
    lease: float
    incoming: Mapping[Transfer, Incoming] = field(default_factory=dict)
    line: tuple[Transfer, ...] = ()


def receive(state: Receiver, event: ReceiverEvent, now: float) -> tuple[Receiver, list[Action]]:
    """Applies an event to a decode rank.

    Args:
        state: before the event.
        event: an event of its own, or a message from the prefill side.
        now: seconds on the decode rank's clock.

    Returns:
        The state after it, and what is to be done, in this order.
    """
    match event:
        case Tick():
            return _tick(state, now)
        case Begin():
            return _begin(state, event, now)
    known = state.incoming.get(event.transfer)
    if known is None:
        # Whoever still works on what has ended here must learn it; all else is late news.
        told = isinstance(event, Offer | Beat)
        return state, [Send(Abort(event.transfer, "not known here"))] if told else []
    if isinstance(event, Offer | Beat):
        known = replace(known, heard=now)
        state = _with(state, event.transfer, known)
    match event:
        case Offer(transfer, chunk) if known.phase in ("reserved", "receiving"):
            known = replace(known, phase="receiving", offered=known.offered | 1 << chunk)
            state = _with(state, transfer, known)
            if transfer not in state.line:
                state = replace(state, line=(*state.line, transfer))
            return _grant(state)
        case Landed() if known.phase == "receiving":
            return _landed(state, event, known)
        case Started(transfer) if known.phase == "ready":
            return _with(state, transfer, replace(known, phase="running")), []
        case Finish(transfer) if known.phase == "running":
            return _free(state, transfer, "")
        case Cancel(transfer) if known.phase in ("ready", "running"):
            return _free(state, transfer, "cancelled")
        case Cancel(transfer) if known.phase in ("reserved", "receiving"):
            known = replace(known, phase="draining", reason="cancelled")
            return _with(state, transfer, known), [Send(Abort(transfer, "cancelled"))]
        case Drained(transfer) if known.phase not in ("ready", "running"):
            return _free(state, transfer, known.reason or "given up by the prefill side")
        case Fenced(transfer) if known.phase == "fencing":
            return _free(state, transfer, known.reason)
    return state, []


def _begin(state: Receiver, begin: Begin, now: float) -> tuple[Receiver, list[Action]]:
    transfer = begin.transfer
    if transfer in state.incoming:
        return state, []
    if begin.blocks > state.free_blocks:
        return state, [Send(Abort(transfer, "rejected: no room"))]
    incoming = Incoming(begin, "reserved", now, (0,) * begin.chunks)
    state = replace(state, free_blocks=state.free_blocks - begin.blocks)
    return _with(state, transfer, incoming), []


def _landed(state: Receiver, event: Landed, known: Incoming) -> tuple[Receiver, list[Action]]:
    landed = list(known.landed)
    landed[event.chunk] |= 1 << event.layer
    known = replace(known, landed=tuple(landed))
    actions: list[Action] = []
    if landed[event.chunk] == _all_layers(known):
        actions.append(Send(Received(event.transfer, event.chunk)))
    if not is_full(known):
        return _with(state, event.transfer, known), actions
    state = _with(state, event.transfer, replace(known, phase="ready"))
    actions.append(Start(event.transfer))
    state, granted = _leave(state, event.transfer)
    return state, [*actions, *granted]


def _all_layers(incoming: Incoming) -> int:
    return (1 << incoming.begun.layers) - 1


def is_full(incoming: Incoming) -> bool:
    """Returns whether every layer of every chunk landed."""
    return all(layers == _all_layers(incoming) for layers in incoming.landed)


def has_backend(state: Receiver) -> tuple[Transfer, ...]:
    """Returns the requests that have a backend."""
    return state.line[: state.backends]


def _grant(state: Receiver) -> tuple[Receiver, list[Action]]:
    """Grants what was offered by the requests that have a backend."""
    actions: list[Action] = []
    for transfer in has_backend(state):
        known = state.incoming[transfer]
        new = known.offered & ~known.granted
        if known.phase != "receiving" or not new:
            continue
        chunks = [chunk for chunk in range(known.begun.chunks) if new >> chunk & 1]
        actions += [Send(Grant(transfer, chunk)) for chunk in chunks]
        state = _with(state, transfer, replace(known, granted=known.offered))
    return state, actions


def _leave(state: Receiver, transfer: Transfer) -> tuple[Receiver, list[Action]]:
    """Takes a request out of the line, and grants to who has its backend now."""
    line = tuple(each for each in state.line if each != transfer)
    return _grant(replace(state, line=line))


def _free(state: Receiver, transfer: Transfer, reason: str) -> tuple[Receiver, list[Action]]:
    """Frees a request's blocks, and forgets it."""
    incoming = dict(state.incoming)
    blocks = incoming.pop(transfer).begun.blocks
    state = replace(state, incoming=incoming, free_blocks=state.free_blocks + blocks)
    state, granted = _leave(state, transfer)
    return state, [Free(transfer, blocks, reason), *granted]


def _tick(state: Receiver, now: float) -> tuple[Receiver, list[Action]]:
    actions: list[Action] = []
    for transfer, known in state.incoming.items():
        if known.phase in ("ready", "running", "fencing"):
            continue
        if now - known.heard > state.lease:
            reason = known.reason or "the prefill side is silent"
            state = _with(state, transfer, replace(known, phase="fencing", reason=reason))
            actions.append(Fence(transfer))
        else:
            actions.append(Send(Beat(transfer)))
    return state, actions


def _with(state: Receiver, transfer: Transfer, incoming: Incoming) -> Receiver:
    return replace(state, incoming={**state.incoming, transfer: incoming})
