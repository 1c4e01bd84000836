"""Commands that a stage runs in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_apart(
    module: str, arguments: Sequence[str], seconds: float, folder: Path
) -> tuple[int | None, str]:
    """Runs a Python module as a user starts it, and ends it and its children with this process.

    Args:
        module: name of the module.
        arguments: its arguments.
        seconds: how long it may take.
        folder: folder for its temporary files.

    Returns:
        Its exit status, None if it did not end in time, and what it printed.
    """
    # torchrun's variables would make it one of the ranks that torchrun started.
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHED and not name.startswith("TORCHELASTIC_")
    }
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "distca.lifetime", str(os.getpid()), module, *arguments]
    with subprocess.Popen(
        command,
        env=clean | {"OMP_NUM_THREADS": threads, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, f"it did not end in {seconds:g} s"
        finally:
            # Its children, too.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed
