"""A worker: the process of one rank, which runs iterations in the order of their numbers."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import zmq

from distca.inference.cuda_graphs import capture_for
from distca.inference.models import DTYPES, read_model
from distca.inference.sampling import TokenLogprobs, UnusableLogitsError
from distca.inference.sequence_parallel import share_rows
from distca.inference.tensor_parallel import join_ranks
from distca.inference.transports import make_transport
from distca.lifetime import end_with_parent
from distca.plan.span import Int64s
from distca.schedule.serving.iteration import BatchEntry, plan_iteration
from distca.schedule.serving.scheduler import is_long
from distca.serve.engine.choice import choose_token
from distca.serve.engine.interface import interface_towards
from distca.serve.engine.link import Link
from distca.serve.engine.messages import (
    Beat,
    Begin,
    ExecuteBatch,
    Failed,
    Loaded,
    Missed,
    ModelOutput,
    NewRequest,
    SampledToken,
    Scores,
    ToWorker,
    decoder,
    encode,
)
from distca.serve.engine.pool_model import PoolModel
from distca.serve.engine.settings import EngineConfig
from distca.serve.engine.store import EngineStore
from distca.serve.handoff.decode_worker import DecodeWorker
from distca.serve.handoff.prefill_worker import PrefillWorker
from distca.serve.handoff.roles import make_worker

BEAT_SECONDS = 1.0


@dataclass
class _Sequence:
    """A sequence as workers know it.

    Attributes:
        admitted: what it was admitted with.
        tokens: prompt, and the answer so far.
        ranks: owners of its blocks.
        blocks: their numbers there.
    """

    admitted: NewRequest
    tokens: list[int]
    ranks: Int64s
    blocks: Int64s


class _Scoring:
    """Log-probabilities of a prompt's tokens, from the logits before each.

    Attributes:
        found: log-probabilities by position.
        failed: why some have none; None: all have.
    """

    def __init__(self, sequence: _Sequence) -> None:
        self._admitted, self.found = sequence.admitted, dict[int, TokenLogprobs]()
        self.failed: str | None = None

    def __call__(self, positions: Int64s, logits: torch.Tensor) -> None:
        """Takes logits `[positions, vocabulary]`."""
        tokens, count = self._admitted.tokens, self._admitted.logprobs or 0
        for position, row in zip(positions.tolist(), logits, strict=True):
            if position + 1 < self._admitted.prompt:
                try:
                    found = TokenLogprobs.of(row, tokens[position + 1], count)
                except UnusableLogitsError as error:
                    self.failed = str(error)
                    return
                self.found[position + 1] = found


class Worker:
    """One process of a rank of a model.

    Args:
        settings: settings of the engine.
        device: device of the weights.
    """

    def __init__(self, settings: EngineConfig, device: torch.device) -> None:
        from distca.attention import select_kernel
        from distca.cost.step_memory import STEP_SLOTS
        from distca.runtime import Buffers, CoreAttention

        self._settings, self._device = settings, device
        size = settings.tensor_parallel_size
        dtype, trusted = DTYPES[settings.dtype], settings.trust_remote_code
        model = read_model(settings.model, dtype, size, trusted, checks_weights=False)
        timeout = timedelta(seconds=settings.step_timeout)
        group, tensor_ranks = join_ranks(size, timeout)
        if settings.split is not None:
            tensor_ranks = share_rows(tensor_ranks, settings.split, device, timeout)
        self._process, self._rank = dist.get_rank(), group.rank()
        self._transport = make_transport(settings.transport, group, device, timeout)
        kernel = select_kernel(device.type, model.shape.head_dim, model.softcap is not None)
        buffers = Buffers(device, max(STEP_SLOTS, len(model.masks)))
        core = CoreAttention(self._transport, kernel, buffers)
        servers = settings.limits.servers
        computes = self._rank < settings.world_size - servers
        capture = capture_for(model, device, settings.enforce_eager) if computes else None
        # Moves of blocks have buffers of their own.
        self._model = PoolModel(
            model,
            core,
            device,
            settings.block_size,
            tensor_ranks,
            capture,
            make_transport(settings.transport, group, device, timeout) if servers else None,
            computes,
            settings.split,
        )
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    def loaded(self) -> Loaded:
        """Returns the blocks that there is room for."""
        return self._model.loaded(self._process, self._settings)

    def begin(self, blocks: int) -> None:
        """Allocates the pool."""
        self._model.begin(blocks)

    def serve(self, socket: zmq.Socket) -> NoReturn:
        """Does what the engine says."""
        messages = decoder(ToWorker)
        while True:
            done = self.take(messages.decode(socket.recv()))
            if done is not None:
                socket.send(encode(done))

    def take(self, message: ToWorker) -> ModelOutput | None:
        """Does what a message says; returns what is said of an iteration that was run."""
        if isinstance(message, Begin):
            self.begin(message.blocks)
        elif isinstance(message, Missed):
            for iteration in message.iterations:
                self._take_in(iteration)
        else:
            return self.run(message)
        return None

    def _take_in(self, iteration: ExecuteBatch) -> list[BatchEntry]:
        """Takes in what an iteration changes, which must be the next."""
        assert iteration.number == self._next, "an iteration is missing"
        self._next += 1
        self._model.move(iteration.moves)
        for number in iteration.drop:
            self._sequences.pop(number, None)
            self._model.drop(number)
        for admit in iteration.admit:
            nothing = np.zeros(0, dtype=np.int64)
            self._sequences[admit.number] = _Sequence(admit, list(admit.tokens), nothing, nothing)
        return self._parts(iteration)

    def run(self, iteration: ExecuteBatch) -> ModelOutput:
        """Runs an iteration, which must be the next."""
        begin = time.perf_counter()
        sent = self._model.bytes_sent
        parts = self._take_in(iteration)
        settings = self._settings
        plan = plan_iteration(
            parts,
            settings.masks,
            settings.block_size,
            settings.world_size,
            settings.strategy,
            settings.head_groups,
        )
        planned = time.perf_counter()
        logits: dict[int, torch.Tensor] = {}
        scoring = {
            part.sequence: _Scoring(sequence)
            for part in parts
            if (sequence := self._sequences[part.sequence]).admitted.scored
            and part.start < sequence.admitted.prompt
        }
        if self._rank in plan.members or not self._settings.members_only:
            fed = {
                part.sequence: self._sequences[part.sequence].tokens[
                    part.start : part.start + part.count
                ]
                for part in parts
            }
            with self._transport.checked():
                logits = self._model.run(plan, fed, scoring)
        chosen = [
            choose_token(
                self._sequences[feed.number].admitted,
                self._sequences[feed.number].tokens,
                logits[feed.number],
            )
            for feed in iteration.feed
            if feed.samples and feed.number in logits
        ]
        chosen += [
            SampledToken(number, -1, None, each.failed)
            for number, each in scoring.items()
            if each.failed is not None
        ]
        return ModelOutput(
            self._process,
            iteration.number,
            chosen,
            int(plan.new_tokens[self._rank]),
            self._model.bytes_sent - sent,
            planned - begin,
            time.perf_counter() - begin,
            [Scores(number, each.found) for number, each in scoring.items() if each.found],
        )

    def _parts(self, iteration: ExecuteBatch) -> list[BatchEntry]:
        """Takes in what is fed."""
        for feed in iteration.feed:
            sequence = self._sequences[feed.number]
            if feed.token is not None:
                sequence.tokens.append(feed.token)
            if feed.blocks:
                ranks, blocks = np.array([feed.ranks, feed.blocks], dtype=np.int64)
                sequence.ranks = np.append(sequence.ranks, ranks)
                sequence.blocks = np.append(sequence.blocks, blocks)
                self._model.add_blocks(feed.number, blocks[ranks == self._rank].tolist())
        changed = set()
        for move in iteration.moves:
            if (moved := self._sequences.get(move.sequence)) is not None:
                moved.ranks[move.index], moved.blocks[move.index] = move.to, move.becomes
                if self._rank in (move.source, move.to):
                    changed.add(move.sequence)
        for number in changed:
            moved = self._sequences[number]
            self._model.set_blocks(number, moved.blocks[moved.ranks == self._rank].tolist())
        parts, limits = [], self._settings.limits
        for feed in iteration.feed:
            sequence = self._sequences[feed.number]
            dense = not is_long(sequence.admitted.prompt, limits)
            parts.append(BatchEntry(feed.number, feed.start, feed.count, sequence.ranks, dense))
        return parts


def run_worker(
    settings: EngineConfig, rank: int, link: Link, store: str | None, parent: int
) -> None:
    """Runs a worker: the main function of its process.

    Args:
        settings: settings of the engine.
        rank: number of this process among all ranks'.
        link: engine's link.
        store: file by which ranks of one machine find each other; None: the engine's store.
        parent: number of the process that started this one.
    """
    # Signals are for the process that serves, which ends all others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != parent:
        return
    context: zmq.Context = zmq.Context()
    socket = link.connect(context, f"worker-{rank}")
    socket.connect(link.endpoint)
    try:
        found: Any = (
            EngineStore(link, f"store-{rank}", timedelta(seconds=settings.step_timeout))
            if store is None
            else dist.FileStore(store, settings.processes)  # type: ignore[attr-defined]
        )
        # torch holds its side of a store alone, so this one's lives as long as the worker.
        worker = _start(settings, rank, found, Path(store or ".").parent)
        threading.Thread(target=_beat, args=(link, rank), daemon=True).start()
        socket.send(encode(worker.loaded()))
        worker.serve(socket)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        socket.send(encode(Failed(rank, line)))
        context.destroy(linger=1000)


def _beat(link: Link, rank: int) -> None:
    """Tells the engine that this process is alive, whatever its main thread does."""
    socket = link.connect(zmq.Context(), f"beat-{rank}")
    socket.connect(link.endpoint)
    while True:
        socket.send(encode(Beat(rank)))
        time.sleep(BEAT_SECONDS)


def _start(
    settings: EngineConfig, rank: int, store: Any, folder: Path
) -> Worker | PrefillWorker | DecodeWorker:
    """Joins the other ranks, which a store helps to find, and loads the model."""
    own, timeout = settings.own_processes, timedelta(seconds=settings.step_timeout)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank - own.start)
        torch.cuda.set_device(device)
    else:
        cores = (os.cpu_count() or 1) // len(own)
        torch.set_num_threads(max(min(torch.get_num_threads(), cores), 1))
    if interface := interface_towards(settings.nodes.address):
        # What gloo and NCCL listen on is told by the environment alone.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=settings.processes,
        timeout=timeout,
    )
    if settings.roles is not None:
        return make_worker(settings, settings.roles, device, folder)
    return Worker(settings, device)
