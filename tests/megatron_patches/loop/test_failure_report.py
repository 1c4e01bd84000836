"""The end of a rank: which message the job shows, and which processes are left."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from distca.transport import LostRankError
from megatron_patches.loop.failure_report import KnownElsewhere, shortened_traceback
from support.pretraining import ROOT, is_alive


def start(script: str, **more: str) -> subprocess.Popen[str]:
    """A process that runs a script, with the outputs of both kinds in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def assert_ends(pid: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is left"
        time.sleep(0.02)


def test_a_traceback_keeps_the_innermost_calls() -> None:
    def deep(calls: int) -> None:
        if not calls:
            raise KeyError("weights")
        deep(calls - 1)

    try:
        deep(50)
    except KeyError as error:
        lines = shortened_traceback(error).splitlines()
    assert lines[0].strip() == "(46 outer calls)"
    assert lines[-1] == "KeyError: 'weights'"
    assert len(lines) < 25


LAUNCHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
time.sleep(600)
"""
TIED = """
import os, time
from megatron_patches.loop.launcher import end_with_launcher
end_with_launcher(os.environ)
print("tied", flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_torchrun_that_started_it() -> None:
    launcher = start(LAUNCHER.replace("sys.argv[1]", repr(TIED)), TORCHELASTIC_RUN_ID="1")
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "tied\n"
    launcher.kill()
    launcher.communicate(timeout=20)
    assert_ends(child)


LEADER = """
import subprocess, sys, time
from megatron_patches.loop.launcher import kill_leftovers
kill_leftovers()
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_a_process_leaves_is_killed_after_it() -> None:
    leader = start(LEADER)
    assert leader.stdout is not None
    left = int(leader.stdout.readline())
    leader.kill()
    # The output ends when nobody holds it any more.
    leader.communicate(timeout=20)
    assert_ends(left)


RANKS = """
import logging, os, sys, threading
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_patches.loop.failure_report import ending_the_job_on_failure
from megatron_patches.loop.messages import message_handlers

rank, how = int(os.environ["RANK"]), sys.argv[1]
logging.basicConfig(handlers=message_handlers(rank, os.environ))

with ending_the_job_on_failure(os.environ):
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    dist.barrier()
    if how == "every rank fails" or (how == "one rank fails" and rank == 1):
        raise KeyError("weights")
    if how == "wrong input" or (how == "wrong input of one rank" and rank == 1):
        raise ValueError("no such corpus")
    if how.startswith("one rank is killed"):
        if rank == 1:
            os.kill(os.getpid(), 9)
        if how.endswith("deaf"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("how", "line", "reported"),
    [
        ("every rank fails", "[rank 0] error: KeyError: 'weights'", "KeyError: 'weights'"),
        # With our launcher below they always run.
        pytest.param(
            *("one rank fails", "[rank 1] error: KeyError: 'weights'", "KeyError: 'weights'"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("wrong input", "[rank 0] error: no such corpus", "error: no such corpus"),
            marks=pytest.mark.full,
        ),
        ("wrong input of one rank", "[rank 1] error: no such corpus", "error: no such corpus"),
        ("one rank is killed", None, "Signal 9 (SIGKILL) received"),
        ("one rank is killed, the other is deaf", None, "Signal 9 (SIGKILL) received"),
    ],
)
def test_a_job_says_once_why_it_ends(how, line, reported, tmp_path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), how],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert time.monotonic() - begin < 60
    assert lines_before_the_launcher_s(done.stdout) == ([] if line is None else [line])
    # torchrun names the rank that failed first, and why.
    report = done.stdout.partition("Root Cause (first observed failure)")[2]
    assert reported in report
    if "one rank" in how:
        assert "rank      : 1" in report


@pytest.mark.parametrize(
    ("how", "status", "line"),
    [
        ("one rank fails", 1, "error: rank 1 of {} ended with exit code 1: KeyError: 'weights'"),
        ("wrong input", 1, "error: rank 0 of {} ended with exit code 1: no such corpus"),
        (
            "one rank is killed",
            137,
            "error: rank 1 of {} was killed by SIGKILL: the machine may have run out of memory",
        ),
    ],
)
def test_our_launcher_ends_with_the_cause(how, status, line, tmp_path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_patches.launch", "--nproc-per-node", "2", script, how],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout
    *others, last = done.stdout.splitlines()
    assert last == line.format(script)
    assert "ChildFailedError" not in done.stdout
    # The traceback of a Python error is the rank's.
    assert ("Traceback (most recent call last):" in others) == (how == "one rank fails")


def lines_before_the_launcher_s(output: str) -> list[str]:
    """Lines of ranks, which come between those of torchrun's log or before."""
    lines = []
    for line in output.splitlines():
        if line.startswith("Traceback (most recent call last)"):
            break
        if "torch/distributed/elastic" not in line and "torch/distributed/run.py" not in line:
            lines.append(line)
    return lines


def test_a_rank_that_knows_less_waits_for_others() -> None:
    from megatron_patches.loop.failure_report import _patience

    def patience(error: BaseException, rank: int, local_rank: int, world_size: int = 4) -> float:
        told = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
        return _patience(error, {name: str(value) for name, value in told.items()})

    mine = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert patience(mine, 0, 0) == 0 < patience(mine, 2, 0) < patience(mine, 3, 1)
    for error in (
        KnownElsewhere("a checkpoint cannot be saved"),
        RuntimeError("[...] Connection closed by peer [127.0.0.1]:4"),
        dist.DistBackendError("NCCL error"),
        LostRankError("rank 1 cannot finish an exchange of rows"),
    ):
        assert patience(error, 0, 0) > patience(mine, 3, 1)
        # Nobody else knows.
        assert patience(error, 0, 0, world_size=1) == 0
    assert _patience(mine, {}) == 0
