"""A job ends, with its data loaders, if one of its ranks is killed: an example of the library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.pretraining import descendants, kill_all

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def test_a_job_ends_if_a_rank_is_killed() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "examples/transformers_fsdp.py", "--steps", "2000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert job.stdout is not None
        printed = ""
        while "loss" not in printed:
            line = job.stdout.readline()
            assert line, printed
            printed += line
        processes = descendants(job.pid)
        ranks = [each for each in processes if "transformers_fsdp" in _command_line(each)]
        os.kill(ranks[0], signal.SIGKILL)
        rest, _ = job.communicate(timeout=120)
        assert job.returncode not in (0, None), rest
        assert "SIGKILL" in rest
        # Workers of data loaders look after their rank every few seconds.
        until = time.monotonic() + 60
        while any(map(_command_line, processes)) and time.monotonic() < until:
            time.sleep(0.5)
        assert not [each for each in map(_command_line, processes) if each]
    finally:
        kill_all(job)


def _command_line(pid: int) -> str:
    """Returns a process's command line; none, if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
