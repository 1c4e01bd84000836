"""The front of the prefill ranks: what engines say to the first rank, and what it answers.

Nothing here runs by itself. The first rank calls `pump` between two iterations and between two
layers, so engines hear of it as long as it computes, and no longer.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from distca.prefill.facts import disagreement
from distca.prefill.heads import HeadSlices
from distca.prefill.messages import (
    Check,
    Event,
    Hello,
    Join,
    Landing,
    Left,
    Message,
    Ping,
    Pong,
    Prefill,
    Receiving,
    Refusal,
    ToFront,
    Told,
    TransferName,
    Unknown,
    Welcome,
    decoder,
    encode,
)
from distca.schedule.serving.handoff import protocol
from distca.schedule.serving.handoff.protocol import Transfer

logger = logging.getLogger(__name__)

_BEATS_A_LEASE = 4
_LEASES_KEPT = 10
"""Leases without a word after which a process of an engine is forgotten."""
_SAID = {"nixl": "NIXL", "tcp": "TCP"}

_Key = tuple[str, Transfer]
"""Name of an engine, and its number of a prompt."""


@dataclass
class _Asked:
    """A prompt that an engine asks for.

    Attributes:
        identities: processes that have asked, by their numbers.
        prefill: the prompt.
        since: when the first of them asked.
        number: number that the front gave it; None: not all processes have asked yet.
        received: how many processes have received each chunk.
    """

    identities: dict[int, bytes]
    prefill: Prefill
    since: float
    number: int | None = None
    received: Counter[int] = field(default_factory=Counter)


def bind(socket: zmq.Socket, address: str) -> None:
    """Lets a socket listen at an address.

    Raises:
        ValueError: it cannot.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(
            f"cannot listen at {address}: {error.strerror}: give another --port or --host"
        ) from None


def check_address(address: str) -> None:
    """Checks that a process of this machine can listen at an address.

    Raises:
        ValueError: it cannot.
    """
    socket: zmq.Socket = zmq.Context.instance().socket(zmq.ROUTER)
    try:
        bind(socket, address)
    finally:
        socket.close(linger=0)


class Front:
    """Sockets of the first prefill rank.

    Args:
        address: where to listen, `tcp://HOST:PORT`.
        facts: what engines must agree on.
        welcome: answer to an engine that connects; its instance, its transfer and its senders are
            filled in here. It has agents of NIXL if all ranks can use it.
        slices: heads of the ranks.
        transfers: how rows may be sent.

    Attributes:
        state: answer to an engine that asks for the state of the ranks.

    Raises:
        ValueError: nobody can listen there.
    """

    def __init__(
        self,
        address: str,
        facts: Mapping[str, str],
        welcome: Welcome,
        slices: HeadSlices,
        transfers: Sequence[TransferName] = ("tcp",),
    ) -> None:
        self._facts, self._lease, self._transfers = dict(facts), welcome.lease, transfers
        self._welcome = msgspec.structs.replace(welcome, instance=uuid.uuid4().hex)
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        bind(self._socket, address)
        self._decoder = decoder(ToFront)
        self._peers: dict[bytes, Hello] = {}
        self._slices = slices
        self._heard: dict[bytes, float] = {}
        self._asked: dict[_Key, _Asked] = {}
        self._keys: dict[int, _Key] = {}
        self._next = 0
        self._landings: dict[bytes, Landing] = {}
        self._messages: list[Join | Told | Left] = []
        self.state = Pong()
        self._beat_due = 0.0

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def engines(self) -> int:
        """Engines that are connected."""
        return len({each.engine for each in self._peers.values()})

    def pump(self, seconds: float = 0.0) -> None:
        """Reads what engines have said, and tells them that the ranks work.

        Args:
            seconds: how long to wait if nothing has come.
        """
        left = int(1000 * seconds)
        while self._socket.poll(left):
            left = 0
            identity, *frames = self._socket.recv_multipart()
            try:
                message = self._decoder.decode(b"".join(frames))
            except msgspec.MsgspecError as error:
                # Whoever reaches the address can send anything.
                self._say(identity, Refusal(f"a message cannot be read: {error}"))
                continue
            self._hear(identity, message)
        now = time.monotonic()
        if now >= self._beat_due:
            self._beat_due = now + self._lease / _BEATS_A_LEASE
            for number in self._keys:
                self.say(number, protocol.Beat.__name__)
            late = [
                key
                for key, each in self._asked.items()
                if each.number is None and now - each.since > self._lease
            ]
            for key in late:
                del self._asked[key]
            for identity, heard in list(self._heard.items()):
                if now - heard > _LEASES_KEPT * self._lease:
                    self._let_go(identity)

    def take(self) -> list[Join | Told | Left]:
        """Returns what engines have said of prompts since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def say(self, number: int, kind: str, reason: str = "") -> None:
        """Says an event of the hand-off to all processes of a prompt's engine."""
        key = self._keys.get(number)
        if key is not None:
            for identity in self._asked[key].identities.values():
                self._say(identity, Event(kind, key[1], reason=reason))

    def forget(self, number: int) -> None:
        """Forgets a prompt, which has ended."""
        key = self._keys.pop(number, None)
        if key is not None:
            del self._asked[key]

    def give_up(self, number: int) -> None:
        """Lets the engine of a prompt go, since it is silent."""
        key = self._keys.get(number)
        if key is not None:
            for identity in self._asked[key].identities.values():
                self._let_go(identity)

    def close(self) -> None:
        """Ends the connections."""
        self._socket.close(linger=0)

    def _let_go(self, identity: bytes) -> None:
        """Forgets a process of an engine. If it is there after all, it greets again."""
        peer = self._peers.pop(identity, None)
        self._heard.pop(identity, None)
        self._landings.pop(identity, None)
        if peer is not None:
            self._messages.append(Left(peer.inbox))

    def _say(self, identity: bytes, message: Message) -> None:
        self._socket.send_multipart([identity, encode(message)])

    def _hear(self, identity: bytes, message: ToFront) -> None:
        if identity in self._peers:
            self._heard[identity] = time.monotonic()
        if isinstance(message, Hello):
            self._greet(identity, message)
        elif isinstance(message, Check):
            why = disagreement(message.facts, self._facts, only_told=True)
            why = why or self._no_transfer(message.transfers)
            self._say(identity, self._welcome if why is None else Refusal(why))
        elif identity not in self._peers:
            self._say(identity, Unknown())
        elif isinstance(message, Landing):
            self._landings[identity] = message
        elif isinstance(message, Ping):
            self._say(identity, self.state)
        elif isinstance(message, Prefill):
            self._ask(identity, message)
        else:
            self._event(identity, message)

    def _greet(self, identity: bytes, hello: Hello) -> None:
        why = self._why_not(hello)
        if why is not None:
            logger.error("%s is refused: %s", hello.engine, why)
            self._say(identity, Refusal(why))
            return
        transfer = next(each for each in self._transfers if each in hello.transfers)
        if identity not in self._peers:
            by = f", rows by {_SAID[transfer]}" if hello.heads else ""
            logger.info("connected: %s, process %d%s", hello.engine, hello.worker, by)
        self._peers[identity], self._heard[identity] = hello, time.monotonic()
        senders = self._slices.senders(hello.worker, hello.wanted)
        agents = [self._welcome.agents[each] for each in senders if transfer == "nixl"]
        told = {"transfer": transfer, "agents": tuple(agents), "senders": senders}
        self._say(identity, msgspec.structs.replace(self._welcome, **told))

    def _why_not(self, hello: Hello) -> str | None:
        """Why a process of an engine cannot be connected; None: it can."""
        why = disagreement(hello.facts, self._facts)
        if why is not None:
            return why
        if hello.first_head < 0 or hello.wanted.stop > self._slices.kv_heads:
            return (
                f"process {hello.worker} of the engine wants the key-value heads "
                f"{hello.first_head} to {hello.wanted.stop - 1}, and the model has "
                f"{self._slices.kv_heads}"
            )
        return self._no_transfer(hello.transfers)

    def _no_transfer(self, accepted: Sequence[TransferName]) -> str | None:
        """Why no rows can be sent; None: they can."""
        if set(self._transfers) & set(accepted):
            return None
        ours, theirs = (" or ".join(each) for each in (self._transfers, accepted))
        return f"the engine takes rows by {theirs}, and the prefill ranks send them by {ours}"

    def _ask(self, identity: bytes, prefill: Prefill) -> None:
        peer, now = self._peers[identity], time.monotonic()
        key = peer.engine, prefill.transfer
        asked = self._asked.setdefault(key, _Asked({}, prefill, now))
        asked.identities[peer.worker] = identity
        if asked.number is not None or len(asked.identities) < peer.workers:
            return
        asked.number, self._next = self._next, self._next + 1
        self._keys[asked.number] = key
        told = (
            (self._peers[each], self._landings.get(each))
            for _, each in sorted(asked.identities.items())
        )
        receiving = [
            Receiving(each.inbox, each.worker, each.first_head, each.heads, landing)
            for each, landing in told
        ]
        self._messages.append(Join(asked.number, prefill, receiving))

    def _event(self, identity: bytes, event: Event) -> None:
        peer = self._peers[identity]
        asked = self._asked.get((peer.engine, event.transfer))
        if asked is None:
            # It has ended, or was lost: nothing of it is under way.
            if event.kind in (protocol.Abort.__name__, protocol.Beat.__name__):
                self._say(identity, Event(protocol.Drained.__name__, event.transfer))
            return
        if event.kind == protocol.Received.__name__:
            asked.received[event.chunk] += 1
            if asked.received[event.chunk] < peer.workers:
                # A chunk counts once all processes have it.
                return
        if asked.number is not None:
            transfer = Transfer(asked.number)
            self._messages.append(Told(msgspec.structs.replace(event, transfer=transfer)))
