"""A module that ends with the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys

_STARTS = """
import os, subprocess, sys
tied = [sys.executable, "-m", "distca.lifetime", str(os.getpid()), "timeit", "-n1", "-r1"]
subprocess.Popen([*tied, "print('runs', flush=True); __import__('time').sleep(60)"]).wait()
"""


def test_a_module_ends_with_the_process_that_started_it() -> None:
    started = subprocess.Popen([sys.executable, "-c", _STARTS], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "runs\n"
    started.kill()
    # The pipe has its end when the module's process, which also writes to it, has ended.
    started.communicate(timeout=20)


def test_a_module_of_another_process_does_not_run() -> None:
    command = [sys.executable, "-m", "distca.lifetime", str(os.getppid()), "this"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
