"""What engines and prefill ranks say to each other: typed, and never pickled."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from distca.schedule.serving.handoff import protocol
from distca.schedule.serving.handoff.protocol import Transfer

PROTOCOL = 5
"""Version of these messages."""

TransferName = Literal["nixl", "tcp"]
"""How rows come to an engine: NIXL writes them into its memory, or they are messages of ZeroMQ."""

TRANSFERS: tuple[TransferName, ...] = get_args(TransferName)
"""The better one first."""

TransferChoice = Literal["auto", "nixl", "tcp"]
"""What a side accepts: one of these, or either."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """A message; its first entry is its kind."""


_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decoder(kind: object) -> msgspec.msgpack.Decoder:
    """Makes what reads messages of some kinds; others raise `msgspec.ValidationError`."""
    return msgspec.msgpack.Decoder(kind)


# From an engine's process to the front.


class Hello(Message, frozen=True):
    """A process of an engine connects.

    Attributes:
        facts: what both sides must agree on; see `distca.prefill.facts`.
        engine: name of the engine, which all its processes have.
        worker: number of the process.
        workers: processes of the engine; each has a part of the key-value heads.
        inbox: address to which rows are sent; empty for a process that receives none.
        first_head: first key-value head of the process.
        heads: key-value heads of the process.
        transfers: how rows may come.
    """

    facts: dict[str, str]
    engine: str
    worker: int = 0
    workers: int = 1
    inbox: str = ""
    first_head: int = 0
    heads: int = 0
    transfers: tuple[TransferName, ...] = ("tcp",)

    @property
    def wanted(self) -> range:
        """Key-value heads of the model that the process wants."""
        return range(self.first_head, self.first_head + self.heads)


class Check(Message, frozen=True):
    """An engine that has not started asks whether it could connect. It is not connected by that.

    Attributes:
        facts: those of `Hello` that are known by now.
        transfers: how rows may come.
    """

    facts: dict[str, str]
    transfers: tuple[TransferName, ...]


class Landing(Message, frozen=True):
    """Memory of an engine's process into which ranks write rows by NIXL.

    It has slots of equal size. Those of the rank `senders[n]` are the `slots` from number
    `n * slots` on.

    Attributes:
        name: name of the process among agents of NIXL; another memory has another name.
        metadata: what NIXL needs to know to connect to it.
        address: where the first slot begins.
        device: number of the GPU that has the memory; -1: it is the host's.
        slot_bytes: bytes of a slot.
        slots: slots of each rank that sends rows.
        senders: numbers of these ranks.
    """

    name: str
    metadata: bytes
    address: int
    device: int
    slot_bytes: int
    slots: int
    senders: tuple[int, ...] = (0,)


class Prefill(Message, frozen=True):
    """A prompt whose keys and values are wanted. All processes of an engine say it.

    Attributes:
        transfer: number that the engine gave it, and epoch.
        tokens: token ids of the prompt.
        start: first position whose keys and values are wanted; the engine has those before it.
        priority: prompts of a lower number are computed before those of a higher one.
        salt: only prompts of the same salt share keys and values.
    """

    transfer: Transfer
    tokens: list[int]
    start: int = 0
    priority: int = 0
    salt: bytes = b""


class Event(Message, frozen=True):
    """A message of the hand-off.

    Attributes:
        kind: name of its class in `distca.schedule.serving.handoff.protocol`.
        transfer: the engine's number, and epoch.
        chunk: chunk that it is about; -1: all.
        reason: why, if it ends the transfer.
    """

    kind: str
    transfer: Transfer
    chunk: int = -1
    reason: str = ""


class Ping(Message, frozen=True):
    """Asks whether the prefill ranks work."""


# From the front to an engine's process.


class Welcome(Message, frozen=True):
    """The process is connected.

    Attributes:
        instance: name of this run of the prefill ranks.
        ranks: number of ranks.
        chunk: tokens of a chunk of the hand-off.
        layers: layers of the model.
        capacity: most tokens of a prompt.
        lease: seconds without a word after which either side counts as dead.
        transfer: how rows come.
        agents: what NIXL needs to know to connect to each rank that sends rows to the process;
            empty where rows come by TCP.
        senders: numbers of these ranks.
    """

    instance: str
    ranks: int
    chunk: int
    layers: int
    capacity: int
    lease: float
    transfer: TransferName = "tcp"
    agents: tuple[bytes, ...] = ()
    senders: tuple[int, ...] = ()


class Refusal(Message, frozen=True):
    """The process cannot be connected, and why."""

    reason: str


class Unknown(Message, frozen=True):
    """The process is not connected: it must say `Hello`, and whatever was under way is lost."""


class Pong(Message, frozen=True):
    """The prefill ranks work.

    Attributes:
        waiting: prompts that wait.
        running: prompts that are computed.
        held: prompts that are computed, and not received whole.
        received: prompts that were received whole, since the ranks started.
        ended: prompts that ended before, since then.
        tokens: tokens whose rows were received, since then.
        computed: tokens that were fed to the model, since then.
        blocks: blocks of all ranks that prompts hold.
    """

    waiting: int = 0
    running: int = 0
    held: int = 0
    received: int = 0
    ended: int = 0
    tokens: int = 0
    computed: int = 0
    blocks: int = 0


# From a prefill rank to an engine's process, and back.


class Rows(Message, frozen=True):
    """Keys and values of some positions and heads of a layer: two more frames, or all of a slot.

    Attributes:
        transfer: the engine's number, and epoch.
        chunk: number of the chunk.
        layer: number of the layer.
        pieces: starts and ends of the positions, in the order of the rows.
        expected: rows of the chunk, from all ranks.
        first_head: first key-value head of the model that they have.
        heads: number of heads.
    """

    transfer: Transfer
    chunk: int
    layer: int
    pieces: list[tuple[int, int]]
    expected: int
    first_head: int
    heads: int

    @property
    def of_heads(self) -> range:
        """Key-value heads of the model that they have."""
        return range(self.first_head, self.first_head + self.heads)

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(end - start for start, end in self.pieces)


class InSlot(Message, frozen=True):
    """Rows are in a slot of a landing: keys, and values behind them."""

    rows: Rows
    slot: int


class SlotFree(Message, frozen=True):
    """Rows were taken out of a slot, which may be written again."""

    slot: int


# From the first rank to all ranks, between two iterations.


class Receiving(Message, frozen=True, tag=False):
    """A process that receives rows of a prompt; see `Hello`.

    Attributes:
        landing: memory into which they are written; None: they are sent to its inbox.
    """

    inbox: str
    worker: int
    first_head: int
    heads: int
    landing: Landing | None = None

    @property
    def wanted(self) -> range:
        """Key-value heads of the model that it wants."""
        return range(self.first_head, self.first_head + self.heads)


class Join(Message, frozen=True):
    """A prompt, by the number that the front gave it, and the processes that receive its rows."""

    number: int
    prefill: Prefill
    receiving: list[Receiving]


class Told(Message, frozen=True):
    """What an engine said of a prompt: the event's transfer has the front's number."""

    event: Event


class Left(Message, frozen=True):
    """A process has disconnected: send it nothing, and do not wait for it."""

    inbox: str


class Agreed(Message, frozen=True):
    """What all ranks take in before the next iteration.

    Attributes:
        now: seconds on the first rank's clock.
        messages: what engines said, in the order in which it came.
    """

    now: float
    messages: list[Join | Told | Left] = msgspec.field(default_factory=list)


ToFront = Hello | Check | Landing | Prefill | Event | Ping
ToClient = Welcome | Refusal | Unknown | Pong | Event

_BARE = {each.__name__: each for each in (protocol.Beat, protocol.Drained)}


def event_of(message: Event) -> protocol.ToSender | protocol.ToReceiver:
    """Returns the event of the hand-off that a message tells."""
    if message.kind in _BARE:
        return _BARE[message.kind](message.transfer)
    if message.kind == protocol.Received.__name__:
        return protocol.Received(message.transfer, message.chunk)
    assert message.kind == protocol.Abort.__name__, message.kind
    return protocol.Abort(message.transfer, message.reason)


def message_of(event: protocol.ToSender | protocol.ToReceiver) -> Event:
    """Returns an event of the hand-off as a message."""
    chunk, reason = getattr(event, "chunk", -1), getattr(event, "reason", "")
    return Event(type(event).__name__, event.transfer, chunk, reason)
