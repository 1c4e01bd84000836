"""The process of a worker: it runs what the engine's process sends."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import zmq

from distca.inference.messages import ModelOutput, decoder, encode
from distca.inference.worker import Worker
from distca.lifetime import end_with_parent
from distca.serve.engine.interface import interface_towards
from distca.serve.engine.link import Link
from distca.serve.engine.messages import Beat, Begin, Failed, Loaded, Missed, ToWorker
from distca.serve.engine.settings import ServerConfig
from distca.serve.engine.store import EngineStore
from distca.serve.handoff.decode_worker import DecodeWorker
from distca.serve.handoff.prefill_worker import PrefillWorker
from distca.serve.handoff.roles import make_worker

BEAT_SECONDS = 1.0


class WorkerProcess:
    """A worker that is told by messages what to run.

    Args:
        settings: settings of the server.
        device: device of the weights.
    """

    def __init__(self, settings: ServerConfig, device: torch.device) -> None:
        self.worker = Worker(settings, device)

    def loaded(self) -> Loaded:
        """Returns the blocks that there is room for."""
        worker = self.worker
        return Loaded(dist.get_rank(), worker.room, worker.block_bytes, worker.weight_bytes)

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
            self.worker.begin(message.blocks)
        elif isinstance(message, Missed):
            for iteration in message.iterations:
                self.worker.take_in(iteration)
        else:
            return self.worker.run(message)
        return None


def run_worker(
    settings: ServerConfig, rank: int, link: Link, store: str | None, parent: int
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
    settings: ServerConfig, rank: int, store: Any, folder: Path
) -> WorkerProcess | PrefillWorker | DecodeWorker:
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
    return WorkerProcess(settings, device)
