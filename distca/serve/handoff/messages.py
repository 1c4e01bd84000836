"""Messages of a server whose ranks prefill or decode: typed, and never pickled.

Engine and workers speak over the sockets that every engine has. Besides, each decode process has an
*inbox*, to which prefill ranks send keys and values, and processes of one decode rank what they
must agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec

from distca.inference.messages import Message, NewRequest, SampledToken
from distca.schedule.serving.cdsp import handoff
from distca.schedule.serving.cdsp.handoff import Transfer
from distca.schedule.serving.request import FinishReason
from distca.serve.engine.messages import Beat, Begin, Failed, Loaded


class HandoffEvent(Message, frozen=True):
    """An event of the hand-off, for the side that is told so.

    Attributes:
        kind: name of its class in `distca.schedule.serving.cdsp.handoff`.
        transfer: request and epoch.
        values: values of its other fields, in their order.
        rank: process that tells it.
    """

    kind: str
    transfer: Transfer
    values: list[int | str] = msgspec.field(default_factory=list)
    rank: int = 0


_KINDS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        *(handoff.Offer, handoff.Drained, handoff.Beat, handoff.Grant, handoff.Received),
        *(handoff.Abort, handoff.Begin, handoff.Cancel, handoff.Written),
    )
}


def tell(event: Any, rank: int = 0) -> HandoffEvent:
    """Returns an event as a message."""
    _, *others = (getattr(event, field.name) for field in fields(event))
    return HandoffEvent(type(event).__name__, event.transfer, others, rank)


def event_of(message: HandoffEvent) -> Any:
    """Returns the event that a message tells."""
    return _KINDS[message.kind](message.transfer, *message.values)


# From the engine to prefill ranks.


class RunChunk(Message, frozen=True):
    """A numbered step: a chunk of a prompt, to all members of its group.

    Attributes:
        number: number of the step; a rank's steps come in rising order.
        sequence: number by which workers know the prompt.
        start: position of its first token.
        tokens: its tokens.
        owners: owner of each block of the prompt so far, those of the chunk included.
        blocks: number of each of these blocks on its owner.
        moves: blocks that change their rank: rank and number before, and those after.
        admit: what the token that follows is chosen by; None: none is.
    """

    number: int
    sequence: int
    start: int
    tokens: list[int]
    owners: list[int]
    blocks: list[int]
    moves: list[tuple[int, int, int, int]]
    admit: NewRequest | None


class Ship(Message, frozen=True):
    """Keys and values of a layer of a chunk that are to be sent to a decode rank.

    Attributes:
        step: number of the prompt's latest step: the rows are where that has them.
        sequence: number by which workers know the prompt.
        transfer: request and epoch.
        chunk: number of the chunk.
        layer: number of the layer.
        start: first position.
        end: end of the positions.
        to: number of the decode rank.
    """

    step: int
    sequence: int
    transfer: Transfer
    chunk: int
    layer: int
    start: int
    end: int
    to: int


class Forget(Message, frozen=True):
    """A prompt whose blocks are given back."""

    sequence: int


ToPrefill = Begin | RunChunk | Ship | Forget


# From prefill ranks to the engine.


class LayerDone(Message, frozen=True):
    """A rank has a layer's keys and values of its tokens of a step."""

    rank: int
    number: int
    layer: int


class ChunkDone(Message, frozen=True):
    """A rank has run a step.

    Attributes:
        rank: its rank.
        number: number of the step.
        chosen: token that it chose; None: none.
        tokens: tokens that it owned.
        bytes_sent: bytes that it sent to other ranks, those of moved blocks included.
        bytes_moved: bytes of moved blocks.
        plan_seconds: seconds for the plan.
        seconds: seconds for everything.
    """

    rank: int
    number: int
    chosen: SampledToken | None
    tokens: int
    bytes_sent: int
    bytes_moved: int
    plan_seconds: float
    seconds: float


# From the engine to the first process of a decode rank.


class Expect(Message, frozen=True):
    """A request that a decode rank is to receive and to answer.

    Attributes:
        begin: event of the hand-off.
        admit: the request; its tokens are those whose keys and values are handed over.
        most: most tokens of prompt and answer.
        fewest: fewest tokens of prompt and answer that stops may end.
    """

    begin: HandoffEvent
    admit: NewRequest
    most: int
    fewest: int


class First(Message, frozen=True):
    """The token that a prefill gave, with which decoding begins."""

    transfer: Transfer
    token: int


ToDecode = Begin | Expect | First | HandoffEvent


# From the first process of a decode rank to the engine.


class Decoded(Message, frozen=True):
    """What a decode rank did since it told last.

    Attributes:
        rank: process that tells it.
        joined: transfers whose requests joined the batch.
        chosen: tokens of an iteration.
        finished: why answers have ended, by request.
        freed: transfers whose blocks are free again.
        free: free blocks.
        seconds: seconds of the iteration.
    """

    rank: int
    joined: list[Transfer] = msgspec.field(default_factory=list)
    chosen: list[SampledToken] = msgspec.field(default_factory=list)
    finished: dict[int, FinishReason] = msgspec.field(default_factory=dict)
    freed: list[Transfer] = msgspec.field(default_factory=list)
    free: int = 0
    seconds: float = 0.0


FromRoles = Loaded | Beat | Failed | LayerDone | ChunkDone | Decoded | HandoffEvent


# To the inbox of a decode process.


class Rows(Message, frozen=True):
    """Keys and values of some positions, in two further frames.

    Attributes:
        transfer: request and epoch.
        chunk: number of the chunk.
        layer: number of the layer.
        pieces: starts and ends of the positions, in the order of the rows.
        expected: rows of the chunk, from all ranks.
    """

    transfer: Transfer
    chunk: int
    layer: int
    pieces: list[tuple[int, int]]
    expected: int


class Landed(Message, frozen=True):
    """A further process of a decode rank has all rows of a layer of a chunk, or dropped them."""

    transfer: Transfer
    chunk: int
    layer: int


class Reserve(Message, frozen=True):
    """Blocks of a request, to the further processes of a decode rank."""

    transfer: Transfer
    blocks: list[int]


class Close(Message, frozen=True):
    """A request whose blocks are given back: what arrives late is dropped."""

    transfer: Transfer


class Decode(Message, frozen=True):
    """An iteration: the position and the token of each sequence, by its number."""

    fed: dict[int, tuple[int, int]]


ToInbox = Rows | Landed | Reserve | Close | Decode
