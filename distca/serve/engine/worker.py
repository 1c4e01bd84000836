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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import zmq

from distca.lifetime import end_with_parent
from distca.plan.span import Int64s
from distca.schedule.serving.iteration import Part, plan_iteration
from distca.serve.decode_graphs import capture_for
from distca.serve.engine.messages import (
    Admit,
    Beat,
    Begin,
    Chosen,
    Done,
    Failed,
    Iteration,
    Loaded,
    ToWorker,
    decoder,
    encode,
)
from distca.serve.engine.pool_model import PoolModel
from distca.serve.engine.settings import EngineSettings
from distca.serve.models import DTYPES, read_model
from distca.serve.sampling import TokenLogprobs
from distca.serve.tensor_parallel import join_ranks

BEAT_SECONDS = 1.0


@dataclass
class _Sequence:
    """A sequence as workers know it.

    Attributes:
        admitted: what it was admitted with.
        tokens: prompt, and the answer so far.
        ranks: owners of its blocks.
    """

    admitted: Admit
    tokens: list[int]
    ranks: Int64s


class Worker:
    """One process of a rank of a model.

    Args:
        settings: settings of the engine.
        device: device of the weights.
    """

    def __init__(self, settings: EngineSettings, device: torch.device) -> None:
        from distca.attention import select_kernel
        from distca.cost.step_memory import STEP_SLOTS
        from distca.runtime import Buffers, CoreAttention
        from distca.transport import CollectiveTransport

        self._settings, self._device = settings, device
        size = settings.tensor_parallel_size
        model = read_model(settings.model, DTYPES[settings.dtype], size)
        timeout = timedelta(seconds=settings.step_timeout)
        group, tensor_ranks = join_ranks(size, timeout)
        self._process, self._rank = dist.get_rank(), group.rank()
        self._transport = CollectiveTransport(group, device, members_only=True)
        kernel = select_kernel(device.type, model.shape.head_dim)
        buffers = Buffers(device, max(STEP_SLOTS, len(model.masks)))
        core = CoreAttention(self._transport, kernel, buffers)
        capture = capture_for(model, device, settings.enforce_eager)
        self._model = PoolModel(model, core, device, settings.block_size, tensor_ranks, capture)
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    def loaded(self) -> Loaded:
        """Returns the blocks that there is room for."""
        nbytes, block = self._settings.cache_bytes, self._model.block_bytes
        if nbytes is None:
            free, total = torch.cuda.mem_get_info(self._device)
            nbytes = max(free - int((1 - self._settings.gpu_utilization) * total), 0)
        return Loaded(self._process, nbytes // block, block)

    def begin(self, blocks: int) -> None:
        """Allocates the pool."""
        self._model.begin(blocks)

    def run(self, iteration: Iteration) -> Done:
        """Runs an iteration, which must be the next."""
        begin = time.perf_counter()
        assert iteration.number == self._next, "an iteration is missing"
        self._next += 1
        for number in iteration.drop:
            self._sequences.pop(number, None)
            self._model.drop(number)
        for admit in iteration.admit:
            nothing = np.zeros(0, dtype=np.int64)
            self._sequences[admit.number] = _Sequence(admit, list(admit.tokens), nothing)
        parts = self._parts(iteration)
        settings = self._settings
        plan = plan_iteration(
            parts, settings.masks, settings.block_size, settings.world_size, settings.strategy
        )
        planned = time.perf_counter()
        sent = sum(self._transport.bytes_sent.values())
        logits: dict[int, torch.Tensor] = {}
        if self._rank in plan.members:
            fed = {
                part.sequence: self._sequences[part.sequence].tokens[
                    part.start : part.start + part.count
                ]
                for part in parts
            }
            logits = self._model.run(plan, fed)
        chosen = [
            self._choose(feed.number, logits[feed.number])
            for feed in iteration.feed
            if feed.samples and feed.number in logits
        ]
        return Done(
            self._process,
            iteration.number,
            chosen,
            int(plan.new_tokens[self._rank]),
            sum(self._transport.bytes_sent.values()) - sent,
            planned - begin,
            time.perf_counter() - begin,
        )

    def _parts(self, iteration: Iteration) -> list[Part]:
        """Takes in what is fed."""
        parts = []
        for feed in iteration.feed:
            sequence = self._sequences[feed.number]
            if feed.token is not None:
                sequence.tokens.append(feed.token)
            if feed.blocks:
                sequence.ranks = np.append(sequence.ranks, np.array(feed.ranks, dtype=np.int64))
                pairs = zip(feed.ranks, feed.blocks, strict=True)
                mine = [block for rank, block in pairs if rank == self._rank]
                self._model.add_blocks(feed.number, mine)
            parts.append(Part(feed.number, feed.start, feed.count, sequence.ranks))
        return parts

    def _choose(self, number: int, logits: torch.Tensor) -> Chosen:
        """Chooses the token that follows a sequence."""
        sequence = self._sequences[number]
        admitted, tokens = sequence.admitted, sequence.tokens
        prompt, answer = tokens[: admitted.prompt], tokens[admitted.prompt :]
        changed = admitted.penalties.apply(logits, prompt, answer)
        token = admitted.sampling.choose(changed, admitted.choice, len(tokens))
        if admitted.logprobs is None:
            return Chosen(number, token, None)
        return Chosen(number, token, TokenLogprobs.of(logits, token, admitted.logprobs))


def run_worker(settings: EngineSettings, rank: int, store: str, address: str, parent: int) -> None:
    """Runs a worker: the main function of its process."""
    # Signals are for the process that serves, which ends all others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != parent:
        return
    context = zmq.Context()
    socket = _connect(context, address, f"worker-{rank}")
    try:
        worker = _start(settings, rank, store)
        threading.Thread(target=_beat, args=(address, rank), daemon=True).start()
        socket.send(encode(worker.loaded()))
        messages = decoder(ToWorker)
        while True:
            message = messages.decode(socket.recv())
            if isinstance(message, Begin):
                worker.begin(message.blocks)
            else:
                socket.send(encode(worker.run(message)))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        socket.send(encode(Failed(rank, line)))
        context.destroy(linger=1000)


def _connect(context: zmq.Context, address: str, name: str) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.connect(address)
    return socket


def _beat(address: str, rank: int) -> None:
    """Tells the engine that this process is alive, whatever its main thread does."""
    socket = _connect(zmq.Context(), address, f"beat-{rank}")
    while True:
        socket.send(encode(Beat(rank)))
        time.sleep(BEAT_SECONDS)


def _start(settings: EngineSettings, rank: int, store: str) -> Worker:
    """Joins the other ranks, and loads the model."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        cores = (os.cpu_count() or 1) // settings.processes
        torch.set_num_threads(max(min(torch.get_num_threads(), cores), 1))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, settings.processes),  # type: ignore[attr-defined]
        rank=rank,
        world_size=settings.processes,
        timeout=timedelta(seconds=settings.step_timeout),
    )
    return Worker(settings, device)
