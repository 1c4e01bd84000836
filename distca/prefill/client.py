"""The engine's side: prompts are asked for, and rows are given to whoever writes them.

Rows are given out by `poll`, on the thread that calls it. So they are written between two of the
engine's steps, and none are once a prompt has ended. A thread of the client keeps the connection:
steps of the engine may take longer than a lease, and an engine without work takes none.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import torch
import zmq

from distca.plan.span import Int64s, expand_ranges
from distca.prefill.address import own_host
from distca.prefill.assembly import LayerRows
from distca.prefill.inbox import Arrival, NixlLanding, RowForm, TcpInbox
from distca.prefill.messages import (
    TRANSFERS,
    Event,
    Hello,
    Message,
    Ping,
    Pong,
    Prefill,
    Refusal,
    ToClient,
    TransferChoice,
    TransferName,
    Unknown,
    Welcome,
    decoder,
    encode,
    event_of,
    message_of,
)
from distca.prefill.nixl import NixlAgent, NixlError
from distca.schedule.serving.handoff import Receiver, protocol, receive
from distca.schedule.serving.handoff.protocol import Transfer

logger = logging.getLogger(__name__)

_BEATS_A_LEASE = 4
_FIRST_LEASE = 2.0
"""Lease until the ranks announce theirs. They announce themselves several times in it."""
_HELPED = 0.005
"""Seconds after which the thread looks for what ranks write while prompts are under way."""
_LINGER = 5000
"""Milliseconds for which what was said before the end is still sent."""
_LOOKED = 0.001
"""Seconds after which whoever waits looks for it."""

Outcome = Literal["loaded", "failed", "cancelled"]
"""How the transfer of a prompt ended."""

OnWelcome = Callable[["PrefillClient"], None]
"""Function of the client, called on its thread or that of who calls it."""

OnRows = Callable[[Transfer, int, Int64s, torch.Tensor, torch.Tensor], None]
"""Function of a transfer, a layer, positions int64 `[rows]`, and their keys and values,
`[rows, heads, head_dim]`."""


@dataclass(frozen=True)
class Ended:
    """A prompt that was asked for has ended.

    Attributes:
        transfer: the engine's number, and epoch.
        outcome: `loaded` if all rows have been given out, `cancelled` if the engine asked for it.
        failure: why rows are missing; empty if all have been given out.
    """

    transfer: Transfer
    outcome: Outcome
    failure: str


_Mail = Arrival | Event | Welcome | Unknown
"""What `poll` works on."""

LANDING_BYTES = 256 << 20
"""Memory into which ranks write by NIXL: what they send in some 10 ms."""


class HandshakeError(ValueError):
    """Raised if the prefill ranks cannot work for an engine; the message says why."""


class PrefillClient:
    """A process of an engine, which receives keys and values.

    Args:
        address: where the prefill ranks listen, `tcp://HOST:PORT`.
        hello: who this is; its inbox is filled in here.
        head_dim: numbers of a head.
        dtype: dtype of keys and values.
        on_rows: function that is given rows, which it reads before it returns.
        transfer: how rows may come.
        device: where rows are wanted; those that come by TCP are on the host.
        landing_bytes: memory for rows that come by NIXL, at most.
        on_welcome: function that is called each time when ranks are there that have just started,
            or had been forgotten.

    Attributes:
        welcome: what the prefill ranks have said of themselves; None: nobody has answered.
        refused: why they cannot work for this engine; None: they have not said so.
        state: what they have said last of their work.
        without_nixl: why rows do not come by NIXL; empty: they do, or the ranks do not use it.

    Raises:
        NixlError: it alone is allowed, and cannot be used here.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        head_dim: int,
        dtype: torch.dtype,
        on_rows: OnRows,
        transfer: TransferChoice = "auto",
        device: torch.device | None = None,
        landing_bytes: int = LANDING_BYTES,
        on_welcome: OnWelcome = lambda client: None,
    ) -> None:
        self._on_rows, self._form = on_rows, RowForm(hello.wanted, head_dim, dtype)
        self._on_welcome = on_welcome
        self._device = torch.device("cpu") if device is None else device
        self._landing_bytes = landing_bytes
        self._landing: NixlLanding | None = None
        self.without_nixl, accepted = _accepted(transfer)
        self._inbox = TcpInbox(own_host(address), self._form)
        self._hello = msgspec.structs.replace(hello, inbox=self._inbox.address, transfers=accepted)
        context: zmq.Context = zmq.Context.instance()
        self._front: zmq.Socket = context.socket(zmq.DEALER)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.connect(address)
        self._poller = zmq.Poller()
        for each in (self._inbox.socket, self._front):
            self._poller.register(each, zmq.POLLIN)
        self._to_client = decoder(ToClient)
        self._receiver = Receiver(_FIRST_LEASE)
        # Rows of a layer of a chunk; None: all have come.
        self._arrived: dict[tuple[Transfer, int, int], LayerRows | None] = {}
        # First position of each prompt's rows, and tokens of a chunk.
        self._chunks: dict[Transfer, tuple[int, int]] = {}
        self._ended: list[Ended] = []
        # Prompts that ended before the ranks confirmed them.
        self._told: set[Transfer] = set()
        # What has come and `poll` has not looked at, with the time when it came.
        self._mail: deque[tuple[float, _Mail]] = deque()
        self._heard = self._beat_due = 0.0
        self.state = Pong()
        self.refused: str | None = None
        self.welcome: Welcome | None = None
        # Of the sockets, and of what is written above by both threads.
        self._lock = threading.RLock()
        self._closed, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="distca prefill", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the prefill ranks are connected, and were heard of within their lease."""
        welcome = self.welcome
        return welcome is not None and time.monotonic() - self._heard <= welcome.lease

    @property
    def comes_by(self) -> str:
        """How rows come, for a log."""
        if self._landing is not None:
            return "NIXL"
        return f"TCP ({self.without_nixl or 'as the prefill ranks say'})"

    @property
    def under_way(self) -> int:
        """Prompts that have not ended."""
        return len(self._receiver.incoming)

    @property
    def idle(self) -> bool:
        """Whether no prompt is under way, and `poll` has seen all that has come."""
        return not (self._receiver.incoming or self._mail or self._ended)

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
        with self._lock:
            # The thread may have read the answer, and makes memory for rows now.
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
        self._read(0.0)
        welcome = self.welcome
        if welcome is None or not self.ready:
            self._ended.append(Ended(transfer, "failed", "the prefill ranks are not there"))
            return
        chunks = -(-(len(tokens) - start) // welcome.chunk)
        self._chunks[transfer] = start, welcome.chunk
        self._send(Prefill(transfer, list(tokens), start, priority, salt))
        self._apply(protocol.Begin(transfer, chunks, welcome.layers))
        self._wake.set()

    def cancel(self, transfer: Transfer) -> None:
        """Ends a prompt: none of its rows are given out from now on."""
        if transfer in self._receiver.incoming:
            self._apply(protocol.Cancel(transfer))
            self._tell(transfer, "cancelled", "cancelled")

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
        self._closed.set()
        self._wake.set()
        self._thread.join()
        # What was said last may still be on its way: that a prompt has ended frees its blocks.
        self._front.close(linger=_LINGER)
        self._inbox.close()
        self._end_landing()

    def _keep(self) -> None:
        """Keeps the connection, on a thread of its own."""
        while not self._closed.is_set():
            self._wake.clear()
            with self._lock:
                self._fetch(0.0)
                self._beat()
            # Writes of NIXL may need a hand of this side.
            writes = self._landing is not None and self.under_way
            self._wake.wait(_HELPED if writes else self._lease / _BEATS_A_LEASE / 4)

    @property
    def _lease(self) -> float:
        return self._receiver.lease if self.welcome is None else self.welcome.lease

    def _send(self, message: Message) -> None:
        with self._lock:
            self._front.send(encode(message))

    def _beat(self) -> None:
        """Says a few times in a lease that this process is there, and works on its prompts."""
        now = time.monotonic()
        if now < self._beat_due:
            return
        self._beat_due = now + self._lease / _BEATS_A_LEASE
        self._send(self._hello if self.welcome is None else Ping())
        # No time passes for this one, so it only says that prompts are waited for.
        _, actions = receive(self._receiver, protocol.Tick(), -math.inf)
        for action in actions:
            assert isinstance(action, protocol.Send), "a lease cannot end"
            self._send(message_of(action.message))

    def _fetch(self, seconds: float) -> None:
        """Takes in what has come, or the first that comes. Called with the lock."""
        due = time.monotonic() + seconds
        while not self._fetch_once(due - time.monotonic()) and time.monotonic() < due:
            # Nothing has come yet: wait on.
            continue

    def _fetch_once(self, seconds: float) -> bool:
        """Takes in what has come; returns whether anything has."""
        if self._landing is not None:
            seconds, before = min(seconds, _LOOKED), len(self._mail)
            now = time.monotonic()
            self._mail.extend((now, each) for each in self._landing.receive())
            if len(self._mail) > before:
                self._heard, seconds = now, 0.0
        came, left = False, int(1000 * max(seconds, 0.0))
        while ready := dict(self._poller.poll(left)):
            came, left, self._heard = True, 0, time.monotonic()
            try:
                if self._front in ready:
                    self._hear(self._to_client.decode(self._front.recv()))
                if self._inbox.socket in ready:
                    self._mail.append((self._heard, self._inbox.receive()))
            except (msgspec.MsgspecError, ValueError) as error:
                # Whoever reaches the address can send anything.
                logger.warning("a message cannot be read: %s", error)
        return came or bool(self._mail)

    def _hear(self, message: ToClient) -> None:
        """Takes a message of the front. Called with the lock."""
        if isinstance(message, Event):
            self._mail.append((self._heard, message))
        elif isinstance(message, Welcome):
            # A greeting that was said twice is answered twice.
            if self.welcome is None or self.welcome.instance != message.instance:
                self._mail.append((self._heard, message))
                self.welcome, self.refused, self.state = message, None, Pong()
                self._land_at(message)
                # Their lease may be shorter than what was supposed.
                self._beat_due = 0.0
                self._on_welcome(self)
        elif isinstance(message, Refusal):
            if self.refused != message.reason:
                logger.error("the prefill ranks refuse this engine: %s", message.reason)
            self.refused = message.reason
        elif isinstance(message, Pong):
            self.state = message
        else:
            # They have started again, and know nothing of what was under way.
            self._mail.append((self._heard, message))
            self.welcome, self._beat_due = None, 0.0
            self._beat()

    def _read(self, seconds: float) -> None:
        """Works on what has come, in the order in which it came."""
        with self._lock:
            self._fetch(0.0 if self._mail else seconds)
            mail, self._mail, landing = self._mail, deque(), self._landing
        landed: list[Arrival] = []
        for came, message in mail:
            if isinstance(message, Event):
                if message.reason:
                    logger.warning("the prefill ranks refuse a prompt: %s", message.reason)
                event = event_of(message)
                assert isinstance(event, protocol.Drained | protocol.Beat), "what a sender says"
                self._apply(event, came)
            elif isinstance(message, Welcome | Unknown):
                self._lose("the prefill ranks have started again")
                if isinstance(message, Welcome):
                    with self._lock:
                        self._receiver = Receiver(message.lease)
            else:
                self._land(message, came)
                landed.append(message)
        if landed and landing is not None:
            landing.wait_for_device()
        with self._lock:
            for each in landed:
                each.done()
        self._apply(protocol.Tick())

    def _lose(self, reason: str) -> None:
        """Ends all prompts that are under way."""
        for transfer in list(self._receiver.incoming):
            self._tell(transfer, reason)
            self._apply(protocol.Drained(transfer))

    def _land(self, arrival: Arrival, came: float) -> None:
        """Gives rows out, unless their prompt has ended."""
        rows = arrival.rows
        known = self._receiver.incoming.get(rows.transfer)
        if known is None or known.phase != "receiving":
            return
        starts, ends = np.array(rows.pieces, dtype=np.int64).T
        positions = expand_ranges(starts, ends - starts)
        start, size = self._chunks[rows.transfer]
        first = start + rows.chunk * size
        index = positions - first
        if not 0 <= index.min() <= index.max() < rows.expected:
            logger.warning("rows %s are not of chunk %d", rows.pieces, rows.chunk)
            return
        layer = rows.transfer, rows.chunk, rows.layer
        if layer not in self._arrived:
            self._arrived[layer] = LayerRows(rows.expected, self._form)
        there = self._arrived[layer]
        # Rows come again where a rank does not know whether they have come.
        if there is None:
            return
        whole, keys, values = there.take(index, rows.of_heads, *arrival.tensors())
        if len(whole):
            self._on_rows(rows.transfer, rows.layer, first + whole, keys, values)
        if there.complete:
            self._arrived[layer] = None
            self._apply(protocol.Landed(*layer), came)

    def _land_at(self, welcome: Welcome) -> None:
        """Makes memory for rows that come by NIXL, and tells the front of it. With the lock."""
        self._end_landing()
        if welcome.transfer != "nixl" or not welcome.senders:
            return
        agents = dict(zip(welcome.senders, welcome.agents, strict=True))
        try:
            made = NixlLanding(NixlAgent(), agents, self._form, self._device, self._landing_bytes)
        except NixlError as error:
            logger.warning("rows come by TCP: %s", error)
            self.without_nixl = str(error)
            return
        self._landing = made
        self._send(made.message)

    def _end_landing(self) -> None:
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.close()

    def _apply(self, event: protocol.ReceiverEvent, came: float | None = None) -> None:
        """Applies an event to the receiving side, and does what it asks for.

        Args:
            event: an event.
            came: when it came; None: now.
        """
        now = time.monotonic() if came is None else came
        with self._lock:
            self._receiver, actions = receive(self._receiver, event, now)
        for action in actions:
            match action:
                case protocol.Send(message):
                    # Beats are the thread's.
                    if not isinstance(message, protocol.Beat):
                        self._send(message_of(message))
                case protocol.Start(transfer):
                    # All rows are written: nothing is left to do here.
                    self._apply(protocol.Started(transfer))
                    self._apply(protocol.Finish(transfer))
                case protocol.Fence(transfer):
                    # Rows that come later are dropped, since this process writes them itself.
                    self._apply(protocol.Fenced(transfer))
                case protocol.Free(transfer, reason):
                    for layer in [each for each in self._arrived if each[0] == transfer]:
                        del self._arrived[layer]
                    self._chunks.pop(transfer, None)
                    self._tell(transfer, reason)
                    self._told.discard(transfer)

    def _tell(self, transfer: Transfer, failure: str, outcome: Outcome = "failed") -> None:
        if transfer not in self._told:
            self._ended.append(Ended(transfer, outcome if failure else "loaded", failure))
        if transfer in self._receiver.incoming:
            self._told.add(transfer)


def _accepted(choice: TransferChoice) -> tuple[str, tuple[TransferName, ...]]:
    """Says why rows cannot come by NIXL, and how they may come.

    Raises:
        NixlError: NIXL alone is allowed, and cannot be used here.
    """
    if choice == "tcp":
        return "TCP was chosen", ("tcp",)
    try:
        NixlAgent()
    except NixlError as error:
        if choice == "nixl":
            raise
        return str(error), ("tcp",)
    return "", ("nixl",) if choice == "nixl" else TRANSFERS
