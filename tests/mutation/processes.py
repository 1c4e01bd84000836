"""Commands that leave no process behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from pathlib import Path

import psutil

_MARK = "MUTATION_RUN"
_STANDARD_ERROR = 2


class Commands:
    """Runs commands, from several threads, and ends all that they started."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex

    def run(
        self,
        command: list[str],
        cwd: Path,
        env: dict[str, str],
        seconds: float | None = None,
        shown: bool = False,
    ) -> tuple[int | None, str]:
        """Its exit status, or None after so many seconds; and what it printed.

        Args:
            command: what runs.
            cwd: where.
            env: all of its environment.
            seconds: after which it is killed.
            shown: it prints to the standard error of this process instead.
        """
        mark = f"{self._mark}-{uuid.uuid4().hex}"
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env | {_MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=_STANDARD_ERROR if shown else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            # A child may hold the pipe open after the command has ended.
            printed, _ = process.communicate(timeout=seconds)
            return process.returncode, printed or ""
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            _kill(mark)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def kill(self) -> None:
        """Ends all that runs."""
        _kill(self._mark)


def _kill(mark: str) -> None:
    """Kills processes by a mark in their environment: it stays when they leave their session."""
    for _ in range(20):
        marked = [process for process in psutil.process_iter() if _has(process, mark)]
        for process in marked:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not marked:
            return
        time.sleep(0.05)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        # The dead that nobody has waited for have no environment.
        return process.pid != os.getpid() and process.environ().get(_MARK, "").startswith(mark)
    except (psutil.Error, OSError):
        return False
