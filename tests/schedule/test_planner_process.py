"""A process that plans: answers, errors, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from distca.cost.volume import AttentionShape
from distca.schedule import (
    CountedGlobalBatch,
    ExecutionOptions,
    GlobalBatchPlanner,
    PlannerProcess,
    PlannerWithStats,
    ScheduleConfig,
    documents_in_turn,
)
from support.batches import long_tailed_lengths, placement_rows, task_rows
from support.models import make_run, memory_stream, parse
from support.pretraining import ROOT
from support.ranks import forget_megatron

SHAPE = AttentionShape(8, 2, 64)
PATIENCE = 10
"""Seconds within which a process must have ended."""


@contextmanager
def process(function: Any) -> Iterator[PlannerProcess[Any]]:
    """A process that runs a function, ended behind the test."""
    made = PlannerProcess(function)
    try:
        yield made
    finally:
        made.close()


def lives(pid: int) -> bool:
    """Whether a process is there, and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Whether a process ends by itself soon."""
    until = time.monotonic() + PATIENCE
    while lives(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not lives(pid)


def planner(stages: int = 2, ranks: int = 2) -> PlannerWithStats:
    """A planner of pipelines."""
    servers = np.arange(stages * ranks, dtype=np.int64).reshape(stages, ranks)
    of_batches = GlobalBatchPlanner(servers, ScheduleConfig(shape=SHAPE), ExecutionOptions())
    calls = [{"forward": 2, "backward": 2}]
    return PlannerWithStats(of_batches, {"forward": calls, "backward": calls}, "resend")


@pytest.mark.parametrize("stages", [1, 2])
def test_it_plans_as_the_function_does_here(stages: int) -> None:
    windows = [np.array(long_tailed_lengths(seed, 2048, 64, 1500)) for seed in range(3)]
    documents = documents_in_turn(windows)
    here = planner(stages)(documents)
    with process(planner(stages)) as there:
        for _ in range(2):
            assert in_lists(there(documents)) == in_lists(here)


def in_lists(counted: CountedGlobalBatch) -> list[Any]:
    """All that ranks read, and which ticks share their plans: what is kept for the backward pass
    belongs to the very plan of the forward one."""
    batch = counted.batch
    shared = [id(tick.plans) for tick in batch.ticks]
    return [
        counted.memory,
        [loads.tolist() for loads in counted.forward_loads],
        [{name: each.tolist() for name, each in sent.items()} for sent in counted.bytes_sent],
        [shared.index(each) for each in shared],
        [(tick.tick, [task_rows(plan) for plan in tick.plans]) for tick in batch.ticks],
        [placement_rows(nano.plan) for each in batch.micro_batches for nano in each.plans],
    ]


def test_errors_are_raised_here_and_the_process_goes_on() -> None:
    with process(int) as there:
        with pytest.raises(ValueError, match=r"invalid literal.*'four'"):
            there("four")
        assert there("4") == 4


def test_what_the_function_prints_is_no_answer() -> None:
    with process(print) as there:
        assert there("a scheduler that is being mended") is None
        assert there("and more of it") is None


def test_it_starts_without_torch() -> None:
    """So it takes little memory, once a rank."""
    with process(eval) as there:
        assert there("'torch' in __import__('sys').modules") is False
        assert there("'numpy' in __import__('sys').modules") is True


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_for_the_rank(sent: signal.Signals) -> None:
    """Both may be sent to a whole group of processes, and the rank goes on to save a checkpoint.

    One comes while the process starts.
    """
    with process(int) as there:
        os.kill(there.pid, sent)
        assert there("1") == 1
        os.kill(there.pid, sent)
        assert there("2") == 2


def test_a_process_that_died_is_told() -> None:
    with process(os._exit) as there, pytest.raises(RuntimeError, match=rf"{there.pid} .* code 3"):
        there(3)
    with process(int) as there:
        os.kill(there.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="exit code -9, killed: is there memory left"):
            there("1")


def test_closing_ends_it_within_a_call() -> None:
    there = PlannerProcess(time.sleep)
    there._send((60,))
    there.close()
    assert not lives(there.pid)


@pytest.mark.parametrize("how", ["os._exit(1)", "os.kill(os.getpid(), 9)", "1 / 0", "sys.exit()"])
def test_it_ends_with_its_parent(how: str) -> None:
    """Even in the midst of a call, and if another child still holds the pipes."""
    code = (
        "import os, subprocess, sys, threading, time\n"
        "from distca.schedule import PlannerProcess\n"
        "there = PlannerProcess(time.sleep)\n"
        "threading.Thread(target=there, args=(60,), daemon=True).start()\n"
        "heir = subprocess.Popen(['sleep', '30'], close_fds=False)\n"
        f"print(there.pid, heir.pid, flush=True); time.sleep(0.5)\n{how}\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert done.stdout is not None
    pid, heir = map(int, done.stdout.readline().split())
    done.wait(60)
    try:
        assert ends(pid)
    finally:
        os.kill(heir, signal.SIGKILL)


@pytest.mark.parametrize("written", [0, 20, 40])
def test_it_says_nothing_of_a_parent_that_is_killed_while_it_starts(written: int) -> None:
    """Killed before it sends the function, or in the midst of it."""
    code = (
        "import os, pickle, time\n"
        "from distca.schedule import PlannerProcess\n"
        "def killed(self, value):\n"
        "    print(self.pid, flush=True)\n"
        f"    self._process.stdin.write(pickle.dumps(value)[:{written}])\n"
        "    self._process.stdin.flush()\n"
        "    os.kill(os.getpid(), 9)\n"
        "PlannerProcess._send = killed\n"
        "PlannerProcess(time.sleep)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    # Read to its end, so nobody holds it any more.
    assert done.stderr == ""
    assert ends(int(done.stdout))


def test_a_rank_learns_of_its_planner_s_death(ranks) -> None:
    """After the global batches that were planned already; and its ticks are those of a thread."""
    assert ranks.run(ticks_until_the_planner_dies, world_size=1) == ["ended with exit code -9"]


def ticks_until_the_planner_dies() -> str:
    """The end of the error that a rank's iterator raises when the planner is killed."""
    import torch

    from megatron_patches.batches.ticks import PlannedIterator
    from support import training

    flags = ["--distca", "--seq-length", "256", "--global-batch-size", "3"]
    args = parse(flags)
    training.initialize(args)
    run, maker = make_run(args, memory_stream([200, 56, 300, 212] * 20))
    planned = PlannerProcess(maker.planner())
    count, device = (lambda _: 3), torch.device("cpu")
    ticks = PlannedIterator(maker, 0, count, device, planned)
    try:
        same: Sequence[int] = range(2 * len(next(ticks).schedule.ticks) - 1)
        next(run.data.train)
        for _ in same:
            mine, theirs = next(ticks), next(run.data.train)
            assert mine.bytes_sent == theirs.bytes_sent
            assert (mine.micro_batch is None) == (theirs.micro_batch is None)
            if mine.micro_batch is not None:
                assert torch.equal(mine.micro_batch.tokens, theirs.micro_batch.tokens)
        # Taking ticks is not collective: buffers grow when they run.
        assert maker.runtime.core_attention.buffers.nbytes == 0
        os.kill(planned.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError) as raised:
            list(ticks)
    finally:
        ticks.close()
        run.data.close()
        forget_megatron()
    return str(raised.value).split(str(planned.pid) + " ")[1].split(",")[0]
