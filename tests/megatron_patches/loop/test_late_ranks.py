"""Ranks that are late: which ones are, and the line that names them, on real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from megatron_patches.loop.late_ranks import Seen, describe, late_ranks
from support.ports import free_port
from support.pretraining import FLAGS, ROOT, TOKENIZER
from support.whole_runs import write_documents

WAITING = Seen(
    beat=7,
    place="host a, local rank 0",
    phase="iteration 3, forward pass of tick 0",
    serves_only=False,
    is_idle=False,
    entered=9,
    exchanges=40,
    waits=True,
    line="gpt.py:3 (forward)",
)
SERVER = replace(WAITING, serves_only=True, entered=2)
IDLE = replace(SERVER, is_idle=True, exchanges=30)


def later(*seen: Seen | None) -> list[Seen | None]:
    """What ranks have written a little later, if they still write."""
    return [each and replace(each, beat=each.beat + 4) for each in seen]


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        # All wait, as far as can be told.
        ([WAITING, WAITING, SERVER], []),
        # Others have started exchanges that it has not.
        ([WAITING, replace(WAITING, exchanges=39), SERVER], [1]),
        ([WAITING, WAITING, replace(SERVER, exchanges=39)], [2]),
        # It has entered fewer phases; a server's are other phases, and an idle one waits.
        ([WAITING, replace(WAITING, entered=8), SERVER], [1]),
        ([WAITING, replace(WAITING, entered=8), IDLE], [1]),
        # Ranks that are equally far, one of which does not wait.
        ([WAITING, replace(WAITING, waits=False), WAITING], [1]),
        ([replace(WAITING, waits=False)] * 3, []),
    ],
)
def test_the_rank_that_came_least_far_is_late(ranks: list[Seen], late: list[int]) -> None:
    assert late_ranks(ranks, later(*ranks)) == (late, False)


def test_a_rank_that_writes_no_more_is_late_however_far_it_came() -> None:
    ahead = replace(WAITING, exchanges=90, entered=11)
    before = [WAITING, ahead, replace(WAITING, exchanges=1)]
    assert late_ranks(before, [*later(before[0]), ahead, *later(before[2])]) == ([1], True)
    assert late_ranks([WAITING, None], [*later(WAITING), None]) == ([1], True)
    # One that has only begun to write.
    assert late_ranks([WAITING, None], later(WAITING, WAITING)) == ([], False)


def test_nobody_is_late_while_a_rank_goes_on() -> None:
    on = replace(WAITING, beat=11, exchanges=41)
    assert late_ranks([WAITING, WAITING, WAITING], [on, WAITING, WAITING]) == ([], False)


def test_a_line_names_some_of_many_ranks() -> None:
    line = describe([*range(1, 100)], [WAITING] * 100, True, 600.0)
    assert line.count("local rank") == 8
    assert "; 91 more ranks, are stopped" in line
    assert line.endswith("waited 600 s in iteration 3, forward pass of tick 0")


RANKS = """
import logging, os, sys, time
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_patches.loop.failure_report import ending_the_job_on_failure
from megatron_patches.loop.late_ranks import watch_ranks
from megatron_patches.loop.messages import message_handlers
from megatron_patches.pipeline.progress import Progress

rank, late, how = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2]
logging.basicConfig(handlers=message_handlers(rank, os.environ))
progress, seconds = Progress(), float(sys.argv[3])
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
args = Namespace(
    rank=rank,
    world_size=dist.get_world_size(),
    distributed_timeout_minutes=6 / 60,
    distributed_timeout_seconds_after_init=None,
)
watch = watch_ranks(args, 0, progress, os.environ)


def compute_for_ever():
    time.sleep(600)


with ending_the_job_on_failure(os.environ, watch.end_if_late):
    for iteration in range(1, 4):
        progress.begin(iteration)
        dist.barrier()
    # On a busy machine ranks start at very different times, but now they are together.
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    if rank == late:
        # Until it has written how far it is.
        time.sleep(1)
        print(os.getpid(), "is late", flush=True)
        compute_for_ever()
    progress.enter("the optimizer")
    dist.barrier(group)
"""


def start_ranks(
    processes: int, command: list[str], folder: Path, port: int | None = None
) -> tuple[list[subprocess.Popen[str]], list[Path]]:
    """Starts ranks; what each writes to stderr is a file.

    Args:
        processes: number of ranks.
        command: arguments of Python.
        folder: folder of the files.
        port: port of a store that a launcher hosts; None: the first rank does.
    """
    told = {"TORCHELASTIC_USE_AGENT_STORE": str(port is not None)}
    port = free_port() if port is None else port
    told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    told |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    errors = [folder / f"errors {rank}" for rank in range(processes)]
    started = []
    for rank, path in enumerate(errors):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("w") as file, path.with_name(f"output {rank}").open("w") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env=os.environ | told | of_rank,
                    stdout=output,
                    stderr=file,
                    text=True,
                )
            )
    return started, errors


def wait_for(pattern: str, path: Path, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not re.search(pattern, path.read_text()):
        assert time.monotonic() < deadline, path.read_text()[-2000:]
        time.sleep(0.05)


def end_of_the_others(
    started: list[subprocess.Popen[str]], late: int, errors: list[Path], seconds: float = 120
) -> list[str]:
    """Waits for the end of all ranks but one, and returns the last lines of those that wrote."""
    try:
        for rank, process in enumerate(started):
            if rank != late:
                assert process.wait(timeout=seconds) not in (0, -signal.SIGABRT)
        return [path.read_text().splitlines()[-1] for path in errors if path.read_text().strip()]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("late", "how", "timeout", "line"),
    [
        (1, "hangs", 600, "last seen in iteration 3, forward and backward passes at "),
        (1, "stops", 600, "last seen in iteration 3, forward and backward passes, is stopped"),
        # torch gives up first.
        (1, "stops", 3, "last seen in iteration 3, forward and backward passes, is stopped"),
        # The store is gone with it.
        (0, "stops", 600, "rank 0, which hosts the job's store, is stopped, gone or cut off: "),
    ],
)
def test_a_job_ends_by_a_line_that_names_the_late_rank(
    late: int, how: str, timeout: int, line: str, tmp_path: Path
) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [str(script), str(late), how, str(timeout)]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started, errors = start_ranks(3, command, tmp_path, store.port if late else None)
    wait_for("is late", tmp_path / f"output {late}")
    if how == "stops":
        started[late].send_signal(signal.SIGSTOP)
    last = end_of_the_others(started, late, errors)
    named = [each for each in last if line in each]
    # Without the store ranks cannot agree on who says it.
    assert len(named) == (1 if late else 2), last
    if late:
        place = f"error: rank {late} (host {socket.gethostname()}, local rank {late})"
        assert place in named[0]
        assert len(last) == 1
    if how == "hangs":
        assert "(compute_for_ever), is late: " in named[0]


@pytest.mark.parametrize("late", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_training_rank_or_server_that_is_stopped_is_named(late: int, tmp_path: Path) -> None:
    """Of two ranks and a dedicated server; the limit is Megatron-LM's after the first step."""
    corpus = write_documents(tmp_path / "corpus", [300] * 400)
    flags = [*TOKENIZER, *FLAGS, "--data-path", corpus, "--train-iters", "4000", "--distca"]
    flags += ["--distca-servers", "dedicated:1", "--distributed-timeout-seconds-after-init", "6"]
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started, errors = start_ranks(3, ["pretrain_gpt.py", *flags], tmp_path, store.port)
    wait_for(r"iteration +5/", tmp_path / "output 1")
    started[late].send_signal(signal.SIGSTOP)
    last = end_of_the_others(started, late, errors)
    named = [each for each in last if "is stopped, gone or cut off" in each]
    assert len(named) == 1
    # Ranks tell where they are from time to time: the first steps may be over before the next time.
    place = r"last seen in (the start|iteration \d+), "
    assert re.search(rf"rank {late} \(host .*, local rank {late}\), {place}", named[0])
    assert "the other ranks waited" in named[0]
