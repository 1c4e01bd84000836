"""Faults of a GPU machine, each put in while `distca verify` runs on simulated GPUs.

`python -m support.verify_faults` puts in the faults of one GPU, one after the other in its own
process, and writes what the command says of each to standard output, as JSON. With names of faults
it does so with these alone. Each then has a fork of its process, and the command's ranks are forks
of that fork, so that they have the fault, too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from distca.attention import flash
from distca.commands.main import main
from distca.commands.verify import (
    answers,
    apart,
    command,
    dying_peer,
    environment,
    links,
    transports,
)
from distca.commands.verify import ranks as verify_ranks
from distca.commands.verify.ranks import Tell, chosen, join_ranks, run_stages
from distca.commands.verify.stage import Context, Found, Line
from distca.inference import step_graphs
from distca.inference.model_runner import ModelRunner
from distca.runtime.fused_rows import FusedRowKernels
from distca.runtime.row_sources import MergedRows
from distca.transport import collective
from support.simgpu.forked import run_ranks

SECONDS = 300
"""Time after which the command hangs."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a machine.

    Attributes:
        ranks: GPUs on which it shows.
        stage: stage of `distca verify` in which it does.
        put_in: puts it in while the context lasts.
    """

    ranks: int
    stage: str
    put_in: Callable[[], contextlib.AbstractContextManager[Any]]


FAULTS: dict[str, Fault] = {}


def fault(stage: str, ranks: int = 1) -> Callable[[Any], Any]:
    def take(function: Callable[[], Iterator[None]]) -> Any:
        FAULTS[function.__name__] = Fault(ranks, stage, contextlib.contextmanager(function))
        return function

    return take


@fault("environment")
def another_process_has_the_memory() -> Iterator[None]:
    with mock.patch.object(torch.cuda, "mem_get_info", return_value=(500_000_000, 80_000_000_000)):
        yield


@fault("kernels")
def a_kernel_ignores_its_window() -> Iterator[None]:
    unbounded = {"window_size_left": None, "window_size_right": None}
    with mock.patch.object(flash._Placed, "window", return_value=unbounded):
        yield


@fault("kernels")
def gradients_are_halved() -> Iterator[None]:
    backward = flash.TorchFlashKernel._call_backward

    def half(self: Any, *given: Any) -> None:
        backward(self, *given)
        given[6][1].mul_(0.5)

    with mock.patch.object(flash.TorchFlashKernel, "_call_backward", half):
        yield


@fault("kernels")
def heads_are_regrouped_where_a_line_has_no_query() -> Iterator[None]:
    def place(self: Any, tasks: Any, device: Any) -> Any:
        q, longest = self._offsets(tasks.cu_seqlens_q, device)
        return flash._Placed(
            q, *self._offsets(tasks.cu_seqlens_kv, device)[:1], longest, 512, tasks
        )

    with mock.patch.object(flash._FlashKernel, "_place", place):
        yield


@fault("answers")
def a_graph_replays_stale_inputs() -> Iterator[None]:
    run = step_graphs._Step.run

    def stale(self: Any, numbers: Any) -> Any:
        others = numbers.copy()
        others[0] = 0
        return run(self, others)

    with (
        mock.patch.object(step_graphs._Step, "run", stale),
        mock.patch.object(answers, "FAMILIES", {"llama": "pass-kv"}),
    ):
        yield


@fault("memory")
def a_pool_is_larger_than_the_memory() -> Iterator[None]:
    room = ModelRunner.room
    with mock.patch.object(ModelRunner, "room", lambda *given: 2 * room(*given)):
        yield


@fault("overlap")
def a_stage_does_not_end() -> Iterator[None]:
    ended = threading.Event()

    def waits(context: Context) -> Found:
        ended.wait()
        return Found("", {})

    theirs = verify_ranks.STAGES
    late = [
        replace(stage, seconds=0.2, run=waits) if stage.name == "overlap" else stage
        for stage in theirs
    ]
    with mock.patch.object(verify_ranks, "STAGES", late):
        threading.Timer(2.0, ended.set).start()
        yield


@fault("training")
def keys_have_no_gradients_in_training() -> Iterator[None]:
    popen = subprocess.Popen

    def faulty(words: list[str], **more: Any) -> Any:
        module = {"megatron_patches.pretrain": "support.faulty_training"}
        return popen([module.get(word, word) for word in words], **more)

    with mock.patch.object(apart.subprocess, "Popen", faulty):
        yield


@fault("environment", ranks=2)
def a_rank_has_another_version() -> Iterator[None]:
    def version() -> str:
        return f"3.{10 + dist.get_rank()}"

    with mock.patch.object(environment.platform, "python_version", version):
        yield


@fault("links", ranks=2)
def a_rank_is_killed() -> Iterator[None]:
    copying = links._copying

    def killed(context: Context, nbytes: int) -> float:
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return copying(context, nbytes)

    with mock.patch.object(links, "_copying", killed):
        yield


@fault("transports", ranks=2)
def a_byte_is_lost() -> Iterator[None]:
    wait = collective._Collective.wait

    def lossy(self: collective._Collective) -> torch.Tensor:
        received = wait(self)
        if dist.get_rank() == 1:
            received[:1].zero_()
        return received

    with mock.patch.object(collective._Collective, "wait", lossy):
        yield


@fault("transports", ranks=2)
def a_dead_peer_is_waited_for() -> Iterator[None]:
    popen = subprocess.Popen

    def patient(words: list[str], **more: Any) -> Any:
        return popen(["sh", "-c", "kill -9 $$" if words[5] == "1" else "exec sleep 60"], **more)

    soon = functools.partial(dying_peer.lose_a_peer, most_waited=0.5)
    with (
        mock.patch.object(dying_peer.subprocess, "Popen", patient),
        mock.patch.object(transports, "lose_a_peer", soon),
    ):
        yield


@fault("answers", ranks=2)
def partial_results_are_merged_without_weights() -> Iterator[None]:
    merged = FusedRowKernels._merged

    def unweighted(self: FusedRowKernels, source: MergedRows, *more: Any) -> Any:
        if source.merge is not None and source.merge.merges is not None:
            _, lse = source.parts.tensors
            lse.zero_()
        return merged(self, source, *more)

    with (
        mock.patch.object(FusedRowKernels, "_merged", unweighted),
        mock.patch.object(answers, "FAMILIES", {"llama": "pass-kv"}),
    ):
        yield


def said_here(name: str, context: Context) -> tuple[int, str]:
    """Runs the command with a fault of one GPU, in this process.

    Returns:
        Its exit status, and what it prints.
    """
    its = FAULTS[name]
    folder = context.folder / name
    folder.mkdir()

    def here(ranks: int, names: Sequence[str], output: Path | None, tell: Tell) -> None:
        told: list[Line] = []

        def tell_until_one_fails(line: Line) -> None:
            if not any(each.state == "failed" for each in told):
                told.append(line)
                tell(line)

        where = replace(context, folder=folder)
        run_stages(chosen(names), where, output, tell_until_one_fails, tell_until_one_fails)

    printed = io.StringIO()
    with (
        its.put_in(),
        mock.patch.object(command, "verify_machine", here),
        contextlib.redirect_stdout(printed),
    ):
        status = main(["verify", "--stages", its.stage])
    return status, printed.getvalue()


def said_of_ranks(name: str) -> tuple[int, str] | str:
    """Runs the command with a fault, in a fork of this process; its ranks are forks, too.

    Returns:
        Its exit status, and what it prints; or why it has failed.
    """

    def run(rank: int, folder: Path) -> tuple[int, str]:
        its, printed = FAULTS[name], io.StringIO()
        with (
            its.put_in(),
            mock.patch.object(verify_ranks, "start_process", _fork),
            contextlib.redirect_stdout(printed),
        ):
            status = main(["verify", "--stages", its.stage])
        return status, printed.getvalue()

    found = run_ranks(1, SECONDS, run)
    return found if isinstance(found, str) else found[0]


def _fork(
    started: list[BaseProcess],
    function: Callable[..., object],
    *arguments: object,
    pipe: Connection,
) -> None:
    """Starts a process in the place of `distca.lifetime.start_process`."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=function, args=(*arguments, pipe), daemon=True)
    process.start()
    started.append(process)
    pipe.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        of_ranks = {name: said_of_ranks(name) for name in sys.argv[1:]}
        sys.stdout.write(json.dumps(of_ranks))
        sys.exit()
    with tempfile.TemporaryDirectory() as told:
        rank = join_ranks(0, 1, f"{told}/store", Path(told))
        found = {name: said_here(name, rank) for name, each in FAULTS.items() if each.ranks == 1}
    sys.stdout.write(json.dumps(found))
