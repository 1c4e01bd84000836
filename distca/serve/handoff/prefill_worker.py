"""A prefill rank: it runs chunks of prompts with others, and sends keys and values to who decodes.

A layer is sent as soon as it is computed, granted, and asked for by the engine: between two layers
the rank looks what was asked, and the socket's own threads send while the next layers compute.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
import zmq

from distca.inference.choice import Choice, choose_tokens
from distca.inference.messages import decoder, encode
from distca.inference.pool_model import PoolModel
from distca.plan.span import Int64s, expand_ranges
from distca.runtime.serving.kv_moves import BlockMove, KvMoves
from distca.schedule.serving.iteration import BatchEntry, plan_iteration
from distca.serve.engine.messages import Begin, Loaded
from distca.serve.engine.settings import ServerConfig
from distca.serve.handoff.messages import (
    ChunkDone,
    Forget,
    LayerDone,
    Rows,
    RunChunk,
    Ship,
    ToPrefill,
)
from distca.serve.handoff.settings import Roles
from distca.transport import Transport


class PrefillWorker:
    """The process of a prefill rank.

    Args:
        settings: settings of the engine.
        roles: which ranks prefill and decode.
        model: model of this rank.
        transport: transport of attention, which counts its bytes.
        moving: transport of blocks that change their rank.
        kv_heads: for each process of a decode rank the first of its heads of keys, and how many.
        inbox: function that returns the address of a decode process's inbox.
    """

    def __init__(
        self,
        settings: ServerConfig,
        roles: Roles,
        model: PoolModel,
        transport: Transport,
        moving: Transport,
        kv_heads: list[tuple[int, int]],
        inbox: Callable[[int], str],
    ) -> None:
        self._settings, self._roles, self._model = settings, roles, model
        self._transport, self._moving, self._kv_heads = transport, moving, kv_heads
        self._rank, self._inbox = transport.rank, inbox
        self._messages = decoder(ToPrefill)
        self._socket: Any = None
        self._inboxes: dict[int, zmq.Socket] = {}
        self._later: deque[Any] = deque()
        self._ships: list[Ship] = []
        # Of each prompt the owner and the number of every block.
        self._blocks: dict[int, tuple[Int64s, Int64s]] = {}
        self._done, self._layer = -sys.maxsize, -1
        self._running: int | None = None
        self._moves: KvMoves | None = None
        model.steps.watch = self

    def loaded(self) -> Loaded:
        """Returns the blocks that there is room for."""
        model = self._model
        room = model.room(self._settings)
        return Loaded(self._rank, room, model.block_bytes, model.weight_bytes)

    def serve(self, socket: Any) -> NoReturn:
        """Does what the engine says."""
        self._socket = socket
        while True:
            message = self._later.popleft() if self._later else self._receive()
            if isinstance(message, RunChunk):
                socket.send(encode(self._run(message)))
                self._send_ready()
            elif isinstance(message, Ship):
                self._ships.append(message)
                self._send_ready()
            elif isinstance(message, Forget):
                self._forget(message.sequence)
            else:
                assert isinstance(message, Begin)
                self._model.begin(message.blocks)

    def begins(self, layer: int) -> None:
        """Takes in the blocks of a layer that others had; see `LayerWatch`."""
        assert self._moves is not None
        self._moves.begins(layer)

    def written(self, layer: int) -> None:
        """Tells the engine, and sends what was asked for meanwhile; see `LayerWatch`."""
        self._layer = layer
        assert self._running is not None
        self._socket.send(encode(LayerDone(self._rank, self._running, layer)))
        while self._socket.poll(0):
            message = self._receive()
            if isinstance(message, Ship):
                self._ships.append(message)
            else:
                self._later.append(message)
        self._send_ready()

    def _receive(self) -> Any:
        return self._messages.decode(self._socket.recv())

    def _run(self, message: RunChunk) -> ChunkDone:
        begin = time.perf_counter()
        assert message.number > self._done, "steps come in rising order"
        settings, sequence, count = self._settings, message.sequence, len(message.tokens)
        owners, blocks = (
            np.array(each, dtype=np.int64) for each in (message.owners, message.blocks)
        )
        self._blocks[sequence] = owners, blocks
        part = BatchEntry(sequence, message.start, count, owners)
        plan = plan_iteration(
            [part], settings.masks, settings.block_size, self._roles.prefill, settings.strategy
        )
        self._model.drop(sequence)
        self._model.add_blocks(sequence, blocks[owners == self._rank].tolist())
        planned, sent = time.perf_counter(), self._bytes_sent()
        self._running, self._layer = message.number, -1
        moves = [BlockMove(*each) for each in message.moves]
        self._moves = KvMoves(self._model.steps.pool, self._moving, moves)
        logits = self._model.run(plan, {sequence: message.tokens})
        self._done, self._running = message.number, None
        chosen = None
        if message.admit is not None and sequence in logits:
            (chosen,) = choose_tokens(
                [Choice(message.admit, message.admit.tokens, logits[sequence])]
            )
        return ChunkDone(
            self._rank,
            message.number,
            chosen,
            int(plan.new_tokens[self._rank]),
            self._bytes_sent() - sent,
            self._moves.bytes_planned,
            planned - begin,
            time.perf_counter() - begin,
        )

    def _bytes_sent(self) -> int:
        sent = (each for t in (self._transport, self._moving) for each in t.bytes_sent.values())
        return sum(sent)

    def _forget(self, sequence: int) -> None:
        self._ships = [each for each in self._ships if each.sequence != sequence]
        self._blocks.pop(sequence, None)
        self._model.drop(sequence)

    def _send_ready(self) -> None:
        """Sends the rows that are here by now."""
        waiting, self._ships = self._ships, []
        for ship in waiting:
            here = ship.step == self._running and ship.layer <= self._layer
            if here or ship.step <= self._done:
                self._send(ship)
            else:
                self._ships.append(ship)

    def _send(self, ship: Ship) -> None:
        """Sends a decode rank's processes their heads of a layer's rows on this rank."""
        size = self._settings.block_size
        owners, numbers = self._blocks[ship.sequence]
        block = np.arange(ship.start // size, -(-ship.end // size))
        block = block[owners[block] == self._rank]
        start, end = np.maximum(block * size, ship.start), np.minimum((block + 1) * size, ship.end)
        places = expand_ranges(numbers[block] * size + start - block * size, end - start)
        slots = torch.from_numpy(places).to(self._model.steps.pool.keys.device)
        rows = [each.index_select(0, slots) for each in self._model.steps.pool.rows(ship.layer)]
        pieces = list(zip(start.tolist(), end.tolist(), strict=True))
        header = encode(Rows(ship.transfer, ship.chunk, ship.layer, pieces, ship.end - ship.start))
        leader = self._roles.leader(ship.to)
        for process, (first, count) in enumerate(self._kv_heads):
            heads = [_bytes_of(each[:, first : first + count]) for each in rows]
            self._inbox_of(leader + process).send_multipart([header, *heads], copy=False)

    def _inbox_of(self, process: int) -> zmq.Socket:
        if process not in self._inboxes:
            socket: zmq.Socket = zmq.Context.instance().socket(zmq.PUSH)
            # What is under way is bounded by the grants.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(self._inbox(process))
            self._inboxes[process] = socket
        return self._inboxes[process]


def _bytes_of(rows: torch.Tensor) -> Any:
    """The bytes of a tensor, for whoever sends them."""
    return rows.contiguous().cpu().view(torch.uint8).numpy()
