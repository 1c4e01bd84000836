"""`distca serve` as a process of its own, and the processes that it starts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from support.pretraining import ROOT


class Server:
    """`distca serve` as a process of its own, on a free port.

    Args:
        model: folder of the model.
        flags: further flags.
        waits: whether to wait until it listens.
    """

    def __init__(self, model: Path, *flags: str, waits: bool = True) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distca", "serve", str(model), "--port", "0", *flags],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""
        self.url = self._wait_for(r"listening on (http://\S+)") if waits else ""

    def _wait_for(self, pattern: str) -> str:
        """Reads the log until a line matches, and returns its group."""
        errors: IO[str] = self.process.stderr  # type: ignore[assignment]
        for line in errors:
            self.log += line
            found = re.search(pattern, line)
            if found:
                return found[1]
        raise AssertionError(f"the server ended:\n{self.log}")

    def pids(self) -> list[int]:
        """Numbers of the engine's and the workers' processes, as far as they have started."""
        engines = _spawned_by(self.process.pid)
        return engines + [pid for engine in engines for pid in _spawned_by(engine)]

    def end(self, signal: int | None = None, seconds: float = 30) -> int:
        """Sends a signal, waits for the end, and returns the exit status."""
        if signal is not None and self.process.poll() is None:
            self.process.send_signal(signal)
        try:
            self.log += self.process.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode


def _spawned_by(parent: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in task.read_text().split():
            # It may just have ended.
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def are_gone(pids: list[int], seconds: float) -> bool:
    """Whether processes end within some seconds."""
    end = time.monotonic() + seconds
    while any(_is_there(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
