"""A decode rank: it receives keys and values of prompts, and answers them in batches.

Its first process leads: it runs the receiving side of the hand-off, and decides what each iteration
feeds. Events are applied between two iterations, so that no kernel writes to blocks that are freed.
Further processes, of tensor parallelism, do as it says in the order in which it says it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import zmq

from distca.inference.choice import Choice, choose_tokens
from distca.inference.messages import NewRequest, SampledToken, decoder, encode
from distca.inference.pool_model import PoolModel
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.cdsp import Receiver, receive
from distca.schedule.serving.cdsp import handoff as hand
from distca.schedule.serving.cdsp.handoff import Transfer
from distca.schedule.serving.iteration import BatchEntry, plan_iteration
from distca.schedule.serving.request import finish_of
from distca.serve.engine.messages import Begin, Loaded
from distca.serve.engine.settings import ServerConfig
from distca.serve.handoff.landing import Landing, Layer
from distca.serve.handoff.messages import (
    Close,
    Decode,
    Decoded,
    Expect,
    First,
    HandoffEvent,
    Landed,
    Reserve,
    Rows,
    ToDecode,
    ToInbox,
    event_of,
    tell,
)
from distca.serve.handoff.settings import Roles, sequence_of

Fed = dict[int, tuple[int, int]]
"""Position and token of each sequence that an iteration feeds."""


@dataclass
class _Request:
    """A request that is received, or decodes.

    Attributes:
        expected: what the engine said of it.
        blocks: its blocks.
        tokens: prompt, and the answer so far.
        ready: whether all keys and values are here.
        joined: whether it is in the batch.
    """

    expected: Expect
    blocks: tuple[int, ...]
    tokens: list[int]
    ready: bool = False
    joined: bool = False

    @property
    def admit(self) -> NewRequest:
        """What its tokens are chosen by."""
        return self.expected.admit


class DecodeWorker:
    """One process of a decode rank.

    Args:
        settings: settings of the engine.
        roles: which ranks prefill and decode.
        process: number of this process.
        model: model of this process.
        inboxes: addresses of the inboxes of all processes of the rank, this one's among them.
    """

    def __init__(
        self,
        settings: ServerConfig,
        roles: Roles,
        process: int,
        model: PoolModel,
        inboxes: Sequence[str],
    ) -> None:
        self._settings, self._roles, self._process, self._model = settings, roles, process, model
        place = process - roles.leader(roles.decode_rank(process))
        self._leads = place == 0
        self._landing = Landing(waits=not self._leads)
        self._inbox = _socket(zmq.PULL)
        self._inbox.bind(inboxes[place])
        # Further processes tell the first one, and the first tells all of them.
        others = [a for n, a in enumerate(inboxes) if (n > 0 if self._leads else n == 0)]
        self._others = [_socket(zmq.PUSH) for _ in others]
        for socket, address in zip(self._others, others, strict=True):
            socket.connect(address)
        self._to_decode, self._to_inbox = decoder(ToDecode), decoder(ToInbox)
        self._socket: Any = None
        self._receiver = Receiver(0, roles.backends, roles.lease)
        self._pool: BlockPool | None = None
        self._requests: dict[Transfer, _Request] = {}
        self._firsts: dict[Transfer, int] = {}
        self._here: Counter[Layer] = Counter()
        self._freed: list[Transfer] = []
        self._joined: list[Transfer] = []

    def loaded(self) -> Loaded:
        """Returns the blocks that there is room for."""
        model = self._model
        room = model.room(self._settings)
        return Loaded(self._process, room, model.block_bytes, model.weight_bytes)

    def serve(self, socket: Any) -> NoReturn:
        """Does what the engine, the rank's first process and prefill ranks say."""
        self._socket = socket
        begin = decoder(Begin).decode(socket.recv())
        self._model.begin(begin.blocks)
        if not self._leads:
            while True:
                self._take_from_inbox()
        self._receiver = Receiver(begin.blocks, self._roles.backends, self._roles.lease)
        self._pool = BlockPool(1, begin.blocks, self._settings.block_size)
        poller = zmq.Poller()
        for each in (socket, self._inbox):
            poller.register(each, zmq.POLLIN)
        beat = self._roles.lease / 4
        due = time.monotonic() + beat
        while True:
            left = 0.0 if self._batch() else max(due - time.monotonic(), 0.0)
            poller.poll(int(1000 * left) + (left > 0))
            while socket.poll(0):
                self._take(self._to_decode.decode(socket.recv()))
            while self._inbox.poll(0):
                self._take_from_inbox()
            if time.monotonic() >= due:
                self._apply(hand.Tick())
                due = time.monotonic() + beat
            self._iterate()

    # What others say.

    def _take(self, message: Any) -> None:
        """Takes a message of the engine."""
        if isinstance(message, HandoffEvent):
            self._apply(event_of(message))
        elif isinstance(message, Expect):
            self._expect(message)
        elif isinstance(message, First) and message.transfer in self._requests:
            self._firsts[message.transfer] = message.token
            self._join(message.transfer)

    def _expect(self, message: Expect) -> None:
        begin = event_of(message.begin)
        transfer = begin.transfer
        self._apply(begin)
        if transfer not in self._receiver.incoming:
            self._freed.append(transfer)
            return
        assert self._pool is not None
        (blocks,) = self._pool.allocate([begin.blocks])
        self._requests[transfer] = _Request(message, blocks, list(message.admit.tokens))
        self._reserve(transfer, blocks)
        self._say(Reserve(transfer, list(blocks)))

    def _take_from_inbox(self) -> None:
        """Takes the next message of the inbox, for which it waits."""
        header, *frames = self._inbox.recv_multipart()
        message = self._to_inbox.decode(header)
        if isinstance(message, Rows):
            self._land(message, frames)
        elif isinstance(message, Landed):
            self._count((message.transfer, message.chunk, message.layer))
        elif isinstance(message, Reserve):
            transfer = message.transfer
            self._reserve(transfer, message.blocks)
            for rows, early in self._landing.early(transfer):
                self._land(rows, early)
        elif isinstance(message, Close):
            self._close(message.transfer)
        else:
            self._run(message.fed)

    def _land(self, rows: Rows, frames: Sequence[bytes]) -> None:
        layer = self._landing.take(rows, frames, self._model.steps.pool)
        if layer is None:
            return
        if self._leads:
            self._count(layer)
        else:
            self._say(Landed(layer[0], layer[1], layer[2]))

    def _count(self, layer: Layer) -> None:
        """Notes that a process has a layer of a chunk; the last one completes it."""
        self._here[layer] += 1
        if self._here[layer] == self._roles.decode_tensor:
            del self._here[layer]
            self._apply(hand.Landed(*layer))
            self._tell(hand.Written(*layer))

    def _reserve(self, transfer: Transfer, blocks: Sequence[int]) -> None:
        self._landing.reserve(transfer, blocks)
        self._model.add_blocks(sequence_of(transfer), blocks)

    def _close(self, transfer: Transfer) -> None:
        self._landing.close(transfer)
        self._model.drop(sequence_of(transfer))
        if self._leads:
            self._say(Close(transfer))

    # The hand-off.

    def _apply(self, event: Any) -> None:
        """Applies an event to the receiving side, and does what it asks for."""
        self._receiver, actions = receive(self._receiver, event, time.monotonic())
        for action in actions:
            match action:
                case hand.Send(message):
                    self._tell(message)
                case hand.Start(transfer):
                    self._requests[transfer].ready = True
                    self._join(transfer)
                case hand.Fence(transfer):
                    self._close(transfer)
                    self._apply(hand.Fenced(transfer))
                case hand.Free(transfer):
                    self._close(transfer)
                    assert self._pool is not None
                    self._pool.release(0, self._requests.pop(transfer).blocks)
                    self._firsts.pop(transfer, None)
                    self._freed.append(transfer)

    def _join(self, transfer: Transfer) -> None:
        """Lets a request into the batch, once all is here and its first token is known."""
        request = self._requests.get(transfer)
        if request is not None and request.ready and transfer in self._firsts:
            request.tokens.append(self._firsts.pop(transfer))
            request.joined = True
            self._joined.append(transfer)
            self._apply(hand.Started(transfer))

    def _tell(self, event: Any) -> None:
        self._socket.send(encode(tell(event, self._process)))

    def _say(self, message: Any) -> None:
        for socket in self._others:
            socket.send(encode(message))

    # Decoding.

    def _batch(self) -> list[tuple[Transfer, _Request]]:
        return [(transfer, each) for transfer, each in self._requests.items() if each.joined]

    def _iterate(self) -> None:
        """Runs an iteration, if there is something to decode, and tells what has changed."""
        begin, batch = time.monotonic(), self._batch()
        chosen: list[SampledToken] = []
        finished = {}
        if batch:
            fed = {each.admit.number: (len(each.tokens) - 1, each.tokens[-1]) for _, each in batch}
            self._say(Decode(fed))
            logits = self._run(fed)
            for transfer, each in batch:
                number = each.admit.number
                chosen += choose_tokens([Choice(each.admit, each.tokens, logits[number])])
                if chosen[-1].failed is not None:
                    self._apply(hand.Finish(transfer))
                    continue
                each.tokens.append(chosen[-1].token)
                expected, stops = each.expected, each.admit.sampling.stops
                finish = finish_of(each.tokens, expected.most, expected.fewest, stops)
                if finish is not None:
                    finished[number] = finish
                    self._apply(hand.Finish(transfer))
        if not (chosen or self._freed or self._joined):
            return
        joined, self._joined = self._joined, []
        freed, self._freed = self._freed, []
        seconds = time.monotonic() - begin
        free = self._receiver.free_blocks
        self._socket.send(
            encode(Decoded(self._process, joined, chosen, finished, freed, free, seconds))
        )

    def _run(self, fed: Fed) -> dict[int, torch.Tensor]:
        settings, size = self._settings, self._settings.block_size
        parts = [
            BatchEntry(number, position, 1, np.zeros(position // size + 1, dtype=np.int64))
            for number, (position, _) in fed.items()
        ]
        plan = plan_iteration(parts, settings.masks, size, 1, settings.strategy)
        return self._model.run(plan, {number: [token] for number, (_, token) in fed.items()})


def _socket(kind: int) -> Any:
    socket: zmq.Socket = zmq.Context.instance().socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    return socket
