"""Hand-off of keys and values from prefill ranks to a decode rank: values, messages and actions.

Each side is a pure function, `sender.send` and `receiver.receive`: state, event and time in, state
and actions out. Servers run them over sockets, the request simulator in virtual time, and tests in
every order of events. The decode side takes blocks for all of a request before it asks the prefill
side for it, so a layer may be written as soon as it is computed. A request passes so:

    prefill side, for each chunk              decode side
                                              RECEIVING   its blocks are taken
    a layer is computed: it is written
    all layers are                <- Received             all layers of the chunk landed
    freed, once all chunks are                READY       all chunks landed: Start
                                              RUNNING     ... Finish: blocks are freed

What holds, whatever is late, aborted or dead:

* decoding starts when every layer of every chunk landed, of this `Transfer`: a request that is sent
  again has another epoch;
* either side ends a transfer at any time. The prefill side stops writing, waits until nothing is
  under way, frees its blocks and says `Drained`. The decode side frees its blocks upon that and not
  before: a late write would land in another request's;
* a request that the decode side doesn't know is answered with `Abort`, so that the prefill side
  frees what it computed;
* both sides send `Beat`. Who has heard nothing for a lease closes the channel (`Fence`), after
  which nothing can land any more, and frees its blocks then.

Events of a side are applied between its iterations, so that no kernel writes to blocks that are
freed. The prefill side hears of a request before all else that is said of it; other messages of a
transfer may overtake each other.
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
class Drained:
    """The transfer has ended: no write is under way, and none will be."""

    transfer: Transfer


@dataclass(frozen=True)
class Beat:
    """The sender of this still works on the transfer; both sides send it."""

    transfer: Transfer


# Messages from the decode side.


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
    """A request is placed: blocks are its on the decode side."""

    transfer: Transfer
    chunks: int
    layers: int


@dataclass(frozen=True)
class Computed:
    """Prefill side: a layer of a chunk is computed. It is reported once."""

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


ToSender = Received | Abort | Beat
ToReceiver = Drained | Beat
SenderEvent = ToSender | Begin | Computed | Written | Cancel | Fenced | Tick
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
    reason: str = ""


Action = Send | Write | Start | Fence | Free
