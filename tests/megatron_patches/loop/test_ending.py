"""The end of a rank: which message the job shows, and which processes are left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from megatron_patches.loop.ending import KnownElsewhere, shortened_traceback
from megatron_patches.loop.peers import Peers, exit_status
from support.pretraining import ROOT, is_alive

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


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


@pytest.mark.parametrize(
    ("command", "number", "status"),
    [
        (SLEEPS, signal.SIGKILL, "was killed by SIGKILL"),
        (SLEEPS, signal.SIGSEGV, "was killed by SIGSEGV"),
        (["sh", "-c", "exit 3"], None, "has ended with exit code 3"),
    ],
    ids=["killed", "crashed", "failed"],
)
def test_a_process_that_ended_is_named_by_those_that_did_not(command, number, status) -> None:
    store = dist.HashStore()
    peers = [Peers(store, rank, 3) for rank in range(3)]
    process = subprocess.Popen(command)
    here = socket.gethostname()
    store.set("process 0", f"{here} {os.getpid()}")
    # One of a host that cannot be looked at; the number is no process of this one.
    store.set("process 1", f"elsewhere {2**22 + 1}")
    store.set("process 2", f"{here} {process.pid}")
    if number is not None:
        assert peers[0].lost(patience=0) is None
        process.send_signal(number)
    lost = peers[0].lost(patience=20)
    assert lost is not None
    assert lost.startswith(f"rank 2 on {here} (process {process.pid}) {status}")
    process.wait()
    assert exit_status(process.pid) == "has ended: the launcher says how"
    assert exit_status(os.getpid()) is None


def test_one_of_all_ranks_tells() -> None:
    store = dist.HashStore()
    peers = [Peers(store, rank, 3) for rank in range(3)]
    assert [each.first_to_tell() for each in peers] == [True, False, False]
    later = [Peers(dist.PrefixStore("1", store), rank, 3) for rank in range(2)]
    assert later[0].first_to_tell(patience=0.1)
    before = time.monotonic()
    assert not later[1].first_to_tell(patience=60)
    assert time.monotonic() - before < 30
    # Without torchrun nobody knows of others.
    assert all(Peers.by_torchrun({"RANK": "1"}).first_to_tell() for _ in range(2))


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
import logging, os, sys, threading, time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_patches.loop.ending import ending_the_job_on_failure
from megatron_patches.loop.messages import message_handlers

rank, how = int(os.environ["RANK"]), sys.argv[1]
logging.basicConfig(handlers=message_handlers(rank))

def fails():
    raise KeyError("weights")

with ending_the_job_on_failure(os.environ):
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    dist.barrier()
    if how == "every rank fails":
        fails()
    if how == "one rank fails" and rank == 1:
        fails()
    if how == "wrong input":
        raise ValueError("no such corpus")
    if how == "one rank is killed" and rank == 1:
        os.kill(os.getpid(), 9)
    if how == "one rank is killed, others are deaf":
        if rank == 1:
            # A child that is ended has nothing to do with the rank's end.
            child = os.fork()
            if not child:
                time.sleep(600)
            os.kill(child, 15)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 15
            # Another one ends with the rank: it would hold the output.
            if not os.fork():
                time.sleep(600)
            time.sleep(1)
            os.kill(os.getpid(), 9)
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("how", "message", "most"),
    [
        ("every rank fails", "KeyError: 'weights'", 20),
        ("one rank fails", "KeyError: 'weights'", 20),
        ("wrong input", "error: no such corpus", 1),
        ("one rank is killed", "error: the job ends, since rank 1 on", 1),
        ("one rank is killed, others are deaf", "error: the job ends, since rank 1 on", 1),
    ],
)
def test_a_job_says_once_why_it_ends(how, message, most, tmp_path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), how],
        # From Python 3.12 on it warns of the script's forks.
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert time.monotonic() - begin < 60
    ours = lines_before_the_launcher_s(done.stdout)
    assert sum(message in line for line in ours) == 1, done.stdout
    assert len(ours) <= most, done.stdout


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
    from megatron_patches.loop import ending

    assert ending._is_another_s(KnownElsewhere("a checkpoint cannot be saved"))
    assert ending._is_another_s(RuntimeError("[...] Connection closed by peer [127.0.0.1]:4"))
    assert ending._is_another_s(dist.DistBackendError("NCCL error"))
    assert not ending._is_another_s(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
