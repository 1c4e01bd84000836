"""The processes of one machine's workers: their start, and why one of them ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import zmq

from distca.lifetime import signals_held
from distca.serve.engine.link import Link
from distca.serve.engine.settings import ServerConfig


class WorkerProcesses:
    """Processes of this machine. They end with the process that made them.

    Args:
        settings: settings of the engine.
        link: engine's link.
        store: file by which ranks of one machine find each other; None: they are on several.
        poller: poller that is to notice their ends.
    """

    def __init__(
        self, settings: ServerConfig, link: Link, store: Path | None, poller: zmq.Poller
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: dict[int, Any] = {}
        for rank in settings.own_processes:
            arguments = settings, rank, link, None if store is None else str(store), os.getpid()
            process = context.Process(target=_start_worker, args=arguments, daemon=True)
            with signals_held():
                process.start()
            poller.register(process.sentinel, zmq.POLLIN)
            self._processes[rank] = process

    def ended(self) -> int | None:
        """A worker that has ended; None: all are alive."""
        return next((rank for rank, each in self._processes.items() if not each.is_alive()), None)

    def killed(self, seconds: float = 0.0) -> str | None:
        """Says which worker did not end by itself, if one did not; waits so long for an end."""
        due = time.monotonic() + seconds
        while True:
            alive = []
            for rank, process in self._processes.items():
                if process.is_alive():
                    alive.append(process.sentinel)
                elif process.exitcode:
                    killed = process.exitcode == -signal.SIGKILL
                    why = ", killed: is there memory left?" if killed else ""
                    return f"rank {rank} ended with exit code {process.exitcode}{why}"
            left = due - time.monotonic()
            if left <= 0 or not wait(alive, left):
                return None

    def close(self) -> None:
        """Ends all of them."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()


def _start_worker(
    settings: ServerConfig, rank: int, link: Link, store: str | None, parent: int
) -> None:
    """Runs a worker; torch is imported by it alone."""
    from distca.serve.engine.worker import run_worker

    run_worker(settings, rank, link, store, parent)
