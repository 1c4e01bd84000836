"""Ranks that stay alive: starting torch and Megatron takes seconds, so tests share processes."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.forks import forking

MAX_WORLD_SIZE = 4
MAX_THREADS = 40
"""Of a rank between functions. Some of Megatron's objects keep process groups alive for good (the
hooks of its distributed optimizer do), and each group's threads poll a hundred times a second."""


@dataclass(frozen=True)
class Chosen:
    """What functions do that do not choose themselves.

    Attributes:
        transport: value of `--distca-transport`.
        ping_pong: whether `--distca-ping-pong`.
    """

    transport: str = "collective"
    ping_pong: bool = True


class RankError(AssertionError):
    """A function failed on a rank; the message holds the rank's traceback."""


class Ranks:
    """Up to four processes, each of which runs what it is sent as a rank of a gloo group.

    Args:
        chosen: for all functions.
    """

    def __init__(self, chosen: Chosen = Chosen()) -> None:
        self._chosen = chosen
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, world_size: int, timeout: float = 150
    ) -> list[Any]:
        """Runs `function(*args)` on ranks `0 .. world_size - 1` and returns their results.

        Args:
            function: a module-level function; it finds a fresh gloo group of `world_size` ranks.
            args: picklable arguments.
            world_size: at most `MAX_WORLD_SIZE`.
            timeout: seconds after which the ranks are killed.

        Raises:
            RankError: a rank raised, died or timed out. The ranks are then replaced.
        """
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank in range(world_size):
                self._pipes[rank].send((function, args, rank, world_size, store))
            results = self._collect(world_size, time.monotonic() + timeout)
        if any(_threads_of(process.pid) > MAX_THREADS for process in self._processes):
            self.close()
        return results

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < world_size:
            for rank in range(world_size):
                if rank in results or not self._pipes[rank].poll(0.02):
                    if not self._processes[rank].is_alive():
                        self._fail(f"rank {rank} died")
                    continue
                ok, value = self._pipes[rank].recv()
                if not ok:
                    self._fail(f"on rank {rank} of {world_size}:\n{value}")
                results[rank] = value
            if time.monotonic() > deadline:
                missing = sorted(set(range(world_size)) - set(results))
                self._fail(f"ranks {missing} of {world_size} did not answer in time")
        return [results[rank] for rank in range(world_size)]

    def _fail(self, message: str) -> None:
        self.close()
        raise RankError(message)

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.close()
        context = forking()
        for _ in range(MAX_WORLD_SIZE):
            mine, its = context.Pipe()
            process = context.Process(
                target=_serve, args=(its, sys.path, self._chosen), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        """Ends the ranks; the next `run` starts new ones."""
        for process in self._processes:
            # Coverage saves what it has on this signal, unless the rank hangs.
            process.terminate()
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _threads_of(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())


_chosen = [Chosen()]


def chosen() -> Chosen:
    """What this process was started with."""
    return _chosen[0]


def _serve(pipe: Connection, path: list[str], chosen: Chosen) -> None:
    sys.path[:] = path
    # Functions are unpickled from the module's own name, not from `__mp_main__`.
    importlib.import_module("support.ranks")._chosen[0] = chosen
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A collection, of which a run has several, takes a second where it looks at all that was
    # imported, in pages that are copied for it.
    gc.freeze()
    while True:
        try:
            function, args, rank, world_size, store = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=120),
            )
            result = function(*args)
            dist.barrier()
            forget_megatron()
            dist.destroy_process_group()
            # Groups that cycles keep alive keep threads, which poll.
            gc.collect()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def forget_megatron() -> None:
    """Undoes Megatron's process-wide state, so that the next function may initialise it anew."""
    if "megatron.core.parallel_state" not in sys.modules:
        return
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    if (global_vars := sys.modules.get("megatron.training.global_vars")) is not None:
        global_vars.destroy_global_vars()
    # It keeps a tensor of as many layers as the first model had.
    if (moe_logging := sys.modules.get("megatron.core.transformer.moe.moe_logging")) is not None:
        moe_logging.destroy_moe_metrics_tracker()
    # The same of layers of multi-token prediction.
    predicting = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    if predicting is not None:
        predicting.MTPLossLoggingHelper.tracker = {}
    # Megatron's models set these, and refuse others.
    for kind in ("FLASH", "FUSED", "UNFUSED"):
        os.environ.pop(f"NVTE_{kind}_ATTN", None)
