"""The ties of a process to the launcher that started it, and to the processes that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from distca.lifetime import end_with_torchrun


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """Lets the kernel end this process with torchrun, and Ctrl-C end it without a word.

    Called before anything slow, on the main thread.

    Args:
        environment: environment variables of this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" not in environment:
        # Whoever starts a process by hand may leave.
        return
    end_with_torchrun()


def kill_leftovers() -> None:
    """Starts a process that kills what this process started and left, when it has ended.

    Processes that save in the background wait for ever for one that was killed. Only where this
    process leads a group of its own, as torchrun's do: others are of that group, too.
    """
    if os.getpgrp() == os.getpid():
        subprocess.Popen(
            [sys.executable, "-S", "-c", _KILL_LEFTOVERS, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


_KILL_LEFTOVERS = """
import contextlib, os, select, signal, sys
leader = int(sys.argv[1])
with contextlib.suppress(ProcessLookupError):
    ends = select.poll()
    ends.register(os.pidfd_open(leader), select.POLLIN)
    ends.poll()
with contextlib.suppress(ProcessLookupError):
    os.killpg(leader, signal.SIGKILL)
"""
