"""The engine's side: prompts are asked for, and rows are given to whoever writes them.

Nothing here runs by itself: `poll` reads what has come, on the thread that calls it. So rows are
written between two of the engine's steps, and none are once a prompt has ended.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import zmq

from distca.inference.messages import decoder, encode
from distca.plan.span import Int64s, expand_ranges
from distca.prefill.messages import (
    Event,
    Hello,
    Ping,
    Pong,
    Prefill,
    Refusal,
    Rows,
    ToClient,
    Welcome,
    event_of,
    message_of,
)
from distca.schedule.serving.cdsp import Receiver, receive
from distca.schedule.serving.cdsp import handoff as hand
from distca.schedule.serving.cdsp.handoff import Transfer

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 62
_BEATS_A_LEASE = 4
_SECONDS_TO_GREET = 1.0
_FIRST_LEASE = 10.0
"""Seconds until it is said again who is there, before the ranks have told their lease."""

OnRows = Callable[[Transfer, int, Int64s, torch.Tensor, torch.Tensor], None]
"""Function of a transfer, a layer, positions int64 `[rows]`, and their keys and values,
`[rows, heads, head_dim]`."""


@dataclass(frozen=True)
class Ended:
    """A prompt that was asked for has ended.

    Attributes:
        transfer: the engine's number, and epoch.
        failure: why rows are missing; empty if all have been given out.
    """

    transfer: Transfer
    failure: str


class HandshakeError(ValueError):
    """Raised if the prefill ranks cannot work for an engine; the message says why."""


class PrefillClient:
    """A process of an engine, which receives keys and values.

    Args:
        address: where the prefill ranks listen, `tcp://HOST:PORT`.
        hello: who this is; its inbox is filled in here.
        head_dim: numbers of a head.
        dtype: dtype of keys and values.
        on_rows: function that is given rows.

    Attributes:
        welcome: what the prefill ranks have said of themselves; None: nobody has answered.
        refused: why they cannot work for this engine; None: they have not said so.
        state: what they have said last of their work.
    """

    def __init__(
        self, address: str, hello: Hello, head_dim: int, dtype: torch.dtype, on_rows: OnRows
    ) -> None:
        self._on_rows, self._dtype = on_rows, dtype
        self._row_shape = hello.heads, head_dim
        context: zmq.Context = zmq.Context.instance()
        self._inbox: zmq.Socket = context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        host = own_host(address)
        port = self._inbox.bind_to_random_port(f"tcp://{host}")
        self._hello = _with_inbox(hello, f"tcp://{host}:{port}")
        self._front: zmq.Socket = context.socket(zmq.DEALER)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.connect(address)
        self._poller = zmq.Poller()
        for each in (self._inbox, self._front):
            self._poller.register(each, zmq.POLLIN)
        self._to_client, self._rows = decoder(ToClient), decoder(Rows)
        self._receiver = Receiver(_UNBOUNDED, _UNBOUNDED, _FIRST_LEASE)
        self._arrived: Counter[tuple[Transfer, int, int]] = Counter()
        self._ended: list[Ended] = []
        # Prompts whose end was told before the ranks confirmed it.
        self._told: set[Transfer] = set()
        self._heard = self._beat_due = self._greet_due = 0.0
        self.state = Pong()
        self.refused: str | None = None
        self.welcome: Welcome | None = None

    @property
    def ready(self) -> bool:
        """Whether the prefill ranks are connected, and were heard of within their lease."""
        welcome = self.welcome
        return welcome is not None and time.monotonic() - self._heard <= welcome.lease

    @property
    def under_way(self) -> int:
        """Prompts that have not ended."""
        return len(self._receiver.incoming)

    def connect(self, seconds: float) -> bool:
        """Waits for the prefill ranks; returns whether they have answered.

        Raises:
            HandshakeError: they cannot work for this engine.
        """
        due = time.monotonic() + seconds
        while self.welcome is None and time.monotonic() < due:
            self._read(min(0.05, max(due - time.monotonic(), 0.0)))
            if self.refused is not None:
                raise HandshakeError(self.refused)
        return self.welcome is not None

    def begin(
        self,
        transfer: Transfer,
        tokens: Sequence[int],
        start: int,
        priority: int = 0,
        salt: bytes = b"",
    ) -> None:
        """Asks for the keys and values of a prompt; `poll` tells its end.

        Args:
            transfer: number and epoch that no other prompt has.
            tokens: token ids.
            start: first position whose rows are wanted.
            priority: prompts of a lower number are computed first.
            salt: only prompts of the same salt share keys and values.
        """
        self._greet()
        welcome = self.welcome
        if welcome is None or not self.ready:
            self._ended.append(Ended(transfer, "the prefill ranks are not there"))
            return
        chunks = -(-(len(tokens) - start) // welcome.chunk)
        self._front.send(encode(Prefill(transfer, list(tokens), start, priority, salt)))
        self._apply(hand.Begin(transfer, chunks, welcome.layers, 0))
        for chunk in range(chunks):
            # The blocks of the whole prompt are there, so all of it may be sent at once: nobody
            # waits until a chunk is offered.
            self._apply(hand.Offer(transfer, chunk))

    def cancel(self, transfer: Transfer) -> None:
        """Ends a prompt: none of its rows are given out from now on."""
        if transfer in self._receiver.incoming:
            self._apply(hand.Cancel(transfer))
            self._tell(transfer, "cancelled")

    def poll(self, seconds: float = 0.0) -> list[Ended]:
        """Reads what has come; returns the prompts that have ended since the last call.

        Args:
            seconds: how long to wait if nothing has come.
        """
        self._read(0.0 if self._ended else seconds)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Ends the connection; the prefill ranks notice it by their lease."""
        for each in (self._front, self._inbox):
            each.close(linger=0)

    def _greet(self) -> None:
        """Finds out whether the ranks are there, if that is not known: an engine without work reads
        nothing, and they may have started again meanwhile."""
        now = time.monotonic()
        if self.ready or now < self._greet_due:
            return
        # Whoever waited in vain does not wait again for each prompt.
        self._greet_due = now + self._receiver.lease
        self._beat_due = 0.0
        while not self.ready and time.monotonic() < now + _SECONDS_TO_GREET:
            self._read(0.01)

    def _read(self, seconds: float) -> None:
        self._beat()
        left = int(1000 * seconds)
        while ready := dict(self._poller.poll(left)):
            left = 0
            if self._front in ready:
                self._hear(self._to_client.decode(self._front.recv()))
            if self._inbox in ready:
                header, *frames = self._inbox.recv_multipart()
                self._land(self._rows.decode(header), frames)

    def _beat(self) -> None:
        """Says a few times in a lease that this process is there."""
        now = time.monotonic()
        if now < self._beat_due:
            return
        self._beat_due = now + self._receiver.lease / _BEATS_A_LEASE
        self._front.send(encode(self._hello if self.welcome is None else Ping()))
        self._apply(hand.Tick())

    def _hear(self, message: Any) -> None:
        """Takes a message of the front."""
        self._heard = time.monotonic()
        if isinstance(message, Event):
            if message.reason:
                logger.warning("the prefill ranks refuse a prompt: %s", message.reason)
            event = event_of(message)
            assert isinstance(event, hand.Drained | hand.Beat), "what a sender says"
            self._apply(event)
        elif isinstance(message, Welcome):
            # A greeting that was said twice is answered twice.
            if self.welcome is None or self.welcome.instance != message.instance:
                self._lose("the prefill ranks have started again")
                self.welcome, self.refused = message, None
                self._receiver = Receiver(_UNBOUNDED, _UNBOUNDED, message.lease)
        elif isinstance(message, Refusal):
            if self.refused != message.reason:
                logger.error("the prefill ranks refuse this engine: %s", message.reason)
            self.refused = message.reason
        elif isinstance(message, Pong):
            self.state = message
        else:
            # They have started again, and know nothing of what was under way.
            self._lose("the prefill ranks have started again")
            self.welcome, self._beat_due = None, 0.0

    def _lose(self, reason: str) -> None:
        """Ends all prompts that are under way."""
        for transfer in list(self._receiver.incoming):
            self._tell(transfer, reason)
            self._apply(hand.Drained(transfer))

    def _land(self, rows: Rows, frames: Sequence[bytes]) -> None:
        """Gives rows out, unless their prompt has ended."""
        known = self._receiver.incoming.get(rows.transfer)
        if known is None or known.phase != "receiving":
            return
        self._heard = time.monotonic()
        starts, ends = np.array(rows.pieces, dtype=np.int64).T
        positions = expand_ranges(starts, ends - starts)
        keys, values = (
            torch.frombuffer(bytearray(frame), dtype=self._dtype).view(-1, *self._row_shape)
            for frame in frames
        )
        self._on_rows(rows.transfer, rows.layer, positions, keys, values)
        layer = rows.transfer, rows.chunk, rows.layer
        self._arrived[layer] += len(positions)
        if self._arrived[layer] == rows.expected:
            del self._arrived[layer]
            self._apply(hand.Landed(*layer))

    def _apply(self, event: hand.ReceiverEvent) -> None:
        """Applies an event to the receiving side, and does what it asks for."""
        self._receiver, actions = receive(self._receiver, event, time.monotonic())
        for action in actions:
            match action:
                case hand.Send(message):
                    self._front.send(encode(message_of(message)))
                case hand.Start(transfer):
                    # All rows are written: nothing is left to do here.
                    self._apply(hand.Started(transfer))
                    self._apply(hand.Finish(transfer))
                case hand.Fence(transfer):
                    # Rows that come later are dropped, since this process writes them itself.
                    self._apply(hand.Fenced(transfer))
                case hand.Free(transfer, _, reason):
                    for layer in [each for each in self._arrived if each[0] == transfer]:
                        del self._arrived[layer]
                    self._tell(transfer, reason)
                    self._told.discard(transfer)

    def _tell(self, transfer: Transfer, failure: str) -> None:
        if transfer not in self._told:
            self._ended.append(Ended(transfer, failure))
        if transfer in self._receiver.incoming:
            self._told.add(transfer)


def _with_inbox(hello: Hello, inbox: str) -> Hello:
    values: Mapping[str, Any] = {name: getattr(hello, name) for name in hello.__struct_fields__}
    return Hello(**{**values, "inbox": inbox})


def own_host(address: str) -> str:
    """Address of this machine, as the machine at an address sees it."""
    place = urlsplit(address)
    if place.scheme != "tcp" or not place.hostname or not place.port:
        raise ValueError(f"{address}: give an address as tcp://HOST:PORT")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel only chooses the interface.
        probe.connect((place.hostname, place.port))
        host: str = probe.getsockname()[0]
    return host
