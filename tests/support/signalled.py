"""Commands that get a signal at some moment, each in a session of its own, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from support.pretraining import ROOT

SECONDS_TO_END = 20.0
"""Most seconds from a signal to the end of all processes, and of all writers to the pipes.

It takes two seconds at most on an idle machine. Other tests may hold a process up."""


@dataclass(frozen=True)
class Sent:
    """A signal.

    Attributes:
        number: the signal.
        to_all: whether all processes get it, as at Ctrl-C in a terminal; else the first alone.
    """

    number: signal.Signals
    to_all: bool


CTRL_C = Sent(signal.SIGINT, to_all=True)
TERMINATE = Sent(signal.SIGTERM, to_all=False)
KILL = Sent(signal.SIGKILL, to_all=False)


@dataclass(frozen=True)
class Signalled:
    """What came of a command.

    Attributes:
        status: exit status; negative if a signal ended it.
        seconds: seconds from the signal to the end.
        output, errors: what it wrote.
        left: command lines of processes that it left.
        folders: temporary folders that it left.
    """

    status: int
    seconds: float
    output: str
    errors: str
    left: list[str]
    folders: list[str]


def signalled(arguments: list[str], sent: Sent | None, after: float, folder: Path) -> Signalled:
    """Runs `distca`, and sends a signal.

    Args:
        arguments: arguments of the command.
        sent: the signal; None: it runs to its end.
        after: seconds from the moment at which the command takes signals. Before, the interpreter
            itself starts.
        folder: folder for temporary files.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "distca", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while process.poll() is None and not _takes_signals(process.pid):
            time.sleep(0.001)
        if sent is not None:
            _wait(process, after)
        begin = time.monotonic()
        if sent is not None and process.poll() is None:
            (os.killpg if sent.to_all else os.kill)(process.pid, sent.number)
        output, errors = process.communicate(timeout=None if sent is None else 60)
        left = _session(process.pid)
        while left and time.monotonic() < begin + SECONDS_TO_END:
            time.sleep(0.02)
            left = _session(process.pid)
        seconds = time.monotonic() - begin
        folders = [each.name for each in folder.glob("distca-*")]
        return Signalled(process.returncode, seconds, output, errors, left, folders)
    finally:
        if _session(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def moments(seconds: float, count: int, seed: int = 0) -> list[float]:
    """Draws moments of a run of some seconds: its first, and one in each of equal parts of it."""
    random = Random(seed)
    return [0.0, *(seconds * (n + random.random()) / (count - 1) for n in range(count - 1))]


def _wait(process: subprocess.Popen[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)


def _takes_signals(pid: int) -> bool:
    """Whether a process has a handler of its own for SIGTERM."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def _session(number: int) -> list[str]:
    """Command lines of a session's processes."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (each / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            if int(session) == number and state != "Z":
                found.append((each / "cmdline").read_text().replace("\0", " "))
        except OSError:
            # It has just ended.
            continue
    return found
