"""Processes that exchange bytes over a transport, and may be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.transport.random_exchanges import CHANNELS, Exchanges, message, sizes_of

__all__ = ["CHANNELS", "Exchanges", "Processes", "message", "sizes_of"]


class Processes:
    """Processes of a gloo group that each run one function and may be killed.

    They are forked from a server that has imported torch, which is quick.

    Args:
        function: `(pipe, *args)`, of a module; the pipe leads to the test.
        args: picklable.
        world_size: how many.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "distca.transport", "support.exchanges"])
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            mine, its = context.Pipe()
            process = context.Process(
                target=_work, args=(its, function, args, rank, world_size, store), daemon=True
            )
            process.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def results(self, timeout: float = 120) -> list[Any]:
        """What the functions returned, or the exceptions that they raised, or None for the dead."""
        found: list[Any] = [None] * len(self.pipes)
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not end in time"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                # The pipe of a process that was killed just ends.
                with contextlib.suppress(EOFError):
                    found[rank] = pipe.recv()
        return found

    def close(self) -> None:
        """Kills what is left."""
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _work(
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: str,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    try:
        result: Any = function(pipe, *args)
    except Exception as error:
        result = error
    pipe.send(result)
    pipe.close()
    # Without the goodbyes of the process group: a peer may be dead.
    os._exit(0)
