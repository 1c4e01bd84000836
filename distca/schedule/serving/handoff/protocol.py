"""Hand-off of keys and values from prefill ranks to a decode rank: values, messages and actions.

Each side is a pure function, `sender.send` and `receiver.receive`: state, event and time in, state
and actions out. Servers run them over sockets, the request simulator in virtual time, and tests in
every order of events. A request passes so:

    prefill side, for each chunk              decode side
                                              RESERVED    its blocks are taken
    PLANNED
    OFFERED    computing begins: Offer ->     RECEIVING   in line, in the order of first offers
    GRANTED                       <- Grant                it has one of the backends
    SENT       a layer is written once it is computed and granted
    ACKED                      <- Received    READY       all landed: Start, backend given back
    freed                                     RUNNING     ... Finish: blocks are freed

What holds, whatever is late, aborted or dead:

* a *backend* is a buffer and a channel to receive by. A request has it from its first grant until
  everything landed, so that no request waits half received for one that came after it;
* decoding starts when every layer of every chunk landed, of this `Transfer`: a request that is sent
  again has another epoch;
* either side ends a transfer at any time. The prefill side stops writing, waits until nothing is
  under way, frees its blocks and says `Drained`. The decode side frees its blocks upon that and not
  before: a late write would land in another request's;
* a request that the decode side doesn't know, or has no room for, is answered with `Abort`, so
  that the prefill side frees what it computed;
* both sides send `Beat`. Who has heard nothing for a lease closes the channel (`Fence`), after
  which nothing can land any more, and frees its blocks then.

Events of a side are applied between its iterations, so that no kernel writes to blocks that are
freed. Messages of one transfer may overtake each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Transfer(NamedTuple):
    """Hand-off of a request; each try has an epoch of its own."""

    request: int
    epoch: int = 0


# Messages from the prefill side.


@dataclass(frozen=True)
class Offer:
    """A chunk's computing has begun; the first one is the request's handshake."""

    transfer: Transfer
    chunk: int


@dataclass(frozen=True)
class Drained:
    """The transfer has ended: no write is under way, and none will be."""

    transfer: Transfer


@dataclass(frozen=True)
class Beat:
    """The sender of this still works on the transfer; both sides send it."""

    transfer: Transfer


# Messages from the decode side.


@dataclass(frozen=True)
class Grant:
    """A chunk may be written."""

    transfer: Transfer
    chunk: int


@dataclass(frozen=True)
class Received:
    """All layers of a chunk landed."""

    transfer: Transfer
    chunk: int


@dataclass(frozen=True)
class Abort:
    """The decode side doesn't want the request, or doesn't know it."""

    transfer: Transfer
    reason: str


# Events of a side's own.


@dataclass(frozen=True)
class Begin:
    """A request is placed: blocks are its on the side that is told so."""

    transfer: Transfer
    chunks: int
    layers: int
    blocks: int


@dataclass(frozen=True)
class Dispatched:
    """Prefill side: computing of a chunk begins."""

    transfer: Transfer
    chunk: int


@dataclass(frozen=True)
class Computed:
    """Prefill side: a layer of a chunk is computed."""

    transfer: Transfer
    chunk: int
    layer: int


@dataclass(frozen=True)
class Written:
    """Prefill side: a write has ended, landed or failed."""

    transfer: Transfer
    chunk: int
    layer: int


@dataclass(frozen=True)
class Landed:
    """Decode side: a layer of a chunk is in its blocks."""

    transfer: Transfer
    chunk: int
    layer: int


@dataclass(frozen=True)
class Started:
    """Decode side: the request joined the batch."""

    transfer: Transfer


@dataclass(frozen=True)
class Finish:
    """Decode side: the request is answered."""

    transfer: Transfer


@dataclass(frozen=True)
class Cancel:
    """The client has gone, or the engine gives the request up."""

    transfer: Transfer


@dataclass(frozen=True)
class Fenced:
    """The transfer's channel is closed: nothing lands, and nothing is read, any more."""

    transfer: Transfer


@dataclass(frozen=True)
class Tick:
    """Time has passed: leases are looked at, and beats sent. Due a few times a lease."""


ToSender = Grant | Received | Abort | Beat
ToReceiver = Offer | Drained | Beat
SenderEvent = ToSender | Begin | Dispatched | Computed | Written | Cancel | Fenced | Tick
ReceiverEvent = ToReceiver | Begin | Landed | Started | Finish | Cancel | Fenced | Tick


# Actions.


@dataclass(frozen=True)
class Send:
    """Send a message to the other side."""

    message: ToSender | ToReceiver


@dataclass(frozen=True)
class Write:
    """Prefill side: write a layer of a chunk into the decode side's blocks."""

    transfer: Transfer
    chunk: int
    layer: int


@dataclass(frozen=True)
class Start:
    """Decode side: the request may join the batch."""

    transfer: Transfer


@dataclass(frozen=True)
class Fence:
    """Close the transfer's channel, then tell `Fenced`."""

    transfer: Transfer


@dataclass(frozen=True)
class Free:
    """Give the request's blocks back: this side is done with it, and forgets it.

    Attributes:
        reason: empty where all is well, else why the transfer ended.
    """

    transfer: Transfer
    blocks: int
    reason: str = ""


Action = Send | Write | Start | Fence | Free
