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
    Landed,
    Received,
    ReceiverEvent,
    Send,
    Start,
    Started,
    Tick,
    Transfer,
)

Phase = Literal["receiving", "ready", "running", "draining", "fencing"]


@dataclass(frozen=True)
class Incoming:
    """A request that is received, or decodes.

    Attributes:
        begun: its size.
        phase: where it is.
        heard: when the prefill side was last heard of.
        landed: layers that landed, as bits, by chunk.
        reason: why it is draining or fenced.
    """

    begun: Begin
    phase: Phase
    heard: float
    landed: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True)
class Receiver:
    """State of a decode rank.

    Attributes:
        lease: seconds without a word after which the prefill side counts as dead.
        incoming: requests.
    """

    lease: float
    incoming: Mapping[Transfer, Incoming] = field(default_factory=dict)


def receive(state: Receiver, event: ReceiverEvent, now: float) -> tuple[Receiver, list[Action]]:
    """Applies an event to a decode rank.

    Args:
        state: before the event.
        event: an event of its own, or a message from the prefill side.
        now: seconds on the decode rank's clock.

    Returns:
        The state after it, and what is to be done, in this order.
    """
    if isinstance(event, Tick):
        return _tick(state, now)
    known = state.incoming.get(event.transfer)
    match event:
        case Begin(transfer, chunks) if known is None:
            return _with(state, transfer, Incoming(event, "receiving", now, (0,) * chunks)), []
        case Beat(transfer) if known is None:
            # Whoever still works on what has ended here must learn it; all else is late news.
            return state, [Send(Abort(transfer, "not known here"))]
        case _ if known is None:
            return state, []
        case Beat(transfer):
            return _with(state, transfer, replace(known, heard=now)), []
        case Landed() if known.phase == "receiving":
            return _landed(state, event, known)
        case Started(transfer) if known.phase == "ready":
            return _with(state, transfer, replace(known, phase="running")), []
        case Finish(transfer) if known.phase == "running":
            return _free(state, transfer, "")
        case Cancel(transfer) if known.phase in ("ready", "running"):
            return _free(state, transfer, "cancelled")
        case Cancel(transfer) if known.phase == "receiving":
            known = replace(known, phase="draining", reason="cancelled")
            return _with(state, transfer, known), [Send(Abort(transfer, "cancelled"))]
        case Drained(transfer) if known.phase not in ("ready", "running"):
            return _free(state, transfer, known.reason or "given up by the prefill side")
        case Fenced(transfer) if known.phase == "fencing":
            return _free(state, transfer, known.reason)
    return state, []


def _landed(state: Receiver, event: Landed, known: Incoming) -> tuple[Receiver, list[Action]]:
    landed = list(known.landed)
    landed[event.chunk] |= 1 << event.layer
    known = replace(known, landed=tuple(landed))
    actions: list[Action] = []
    if landed[event.chunk] == _all_layers(known):
        actions.append(Send(Received(event.transfer, event.chunk)))
    if is_full(known):
        known = replace(known, phase="ready")
        actions.append(Start(event.transfer))
    return _with(state, event.transfer, known), actions


def _all_layers(incoming: Incoming) -> int:
    return (1 << incoming.begun.layers) - 1


def is_full(incoming: Incoming) -> bool:
    """Returns whether every layer of every chunk landed."""
    return all(layers == _all_layers(incoming) for layers in incoming.landed)


def _free(state: Receiver, transfer: Transfer, reason: str) -> tuple[Receiver, list[Action]]:
    """Frees a request's blocks, and forgets it."""
    incoming = {each: known for each, known in state.incoming.items() if each != transfer}
    return replace(state, incoming=incoming), [Free(transfer, reason)]


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
