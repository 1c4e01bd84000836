"""The processes that run the stages: torchrun's, or one for each GPU of this machine."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from distca.commands.verify.stage import (
    SEND,
    Context,
    Fault,
    Figures,
    Line,
    NotRun,
    Stage,
    State,
    described,
)
from distca.commands.verify.stages import STAGES
from distca.lifetime import start_process
from distca.scratch import ScratchFolder
from distca.torchrun import read_torchrun

_TIMEOUT = timedelta(minutes=10)
_SCRATCH = "distca-verify-"
_FURTHER_FAILURES = 1.0
"""Seconds in which other ranks may tell that they failed, too."""
_SECONDS_TO_JOIN = 180
"""Seconds in which all ranks must have started and found each other."""
_STARTED, _JOINED = "started", "joined"
_STACKS = "stacks"
_SECONDS_OF_STACKS = 0.5
_KILLED = "it was killed: is there memory left?"

Tell = Callable[[Line], None]


def join_ranks(rank: int, size: int, store: str | None, folder: Path) -> Context:
    """Joins the other ranks, and returns what this one is. Collective.

    Args:
        rank: number of this rank; with torchrun the environment says it.
        size: ranks.
        store: file in which ranks of one machine meet; None: torchrun started them.
        folder: empty folder of this process.
    """
    launched = read_torchrun() if store is None else None
    local_rank = rank if launched is None else launched.local_rank
    local_size = size if launched is None else launched.local_world_size
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        file = dist.FileStore(store, size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, None, _TIMEOUT, size, rank, file)
    control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    assert control is not None
    return Context(
        dist.get_rank(),
        dist.get_world_size(),
        local_rank,
        local_size,
        device,
        control,
        folder,
        None,
        {},
    )


def run_stages(
    stages: Sequence[Stage], context: Context, output: Path | None, tell: Tell, fail: Tell
) -> None:
    """Runs stages one after the other, until one fails. Collective.

    Args:
        stages: stages in order.
        context: this rank.
        output: folder for the files that describe the machine; None: they are not written.
        tell: function that takes the line of a stage on each rank.
        fail: function that takes the line of a stage that failed on this rank, at once, perhaps on
            another thread; other ranks may still be in the stage.
    """
    found: dict[str, Figures] = {}
    for stage in stages:
        folder = context.folder / stage.name
        folder.mkdir()
        its = replace(context, folder=folder, output=output, found=found)
        line = _run_stage(stage, its, fail)
        if line is None:
            return
        if line.state == "ok":
            found[stage.name] = line.figures
        tell(line)


def _run_stage(stage: Stage, context: Context, fail: Tell) -> Line | None:
    """Runs a stage; returns what rank 0 says of it, or None if it failed on this rank."""
    begin = time.perf_counter()

    def line(
        state: State, text: str, cure: str = "", figures: Figures | None = None, details: str = ""
    ) -> Line:
        seconds = time.perf_counter() - begin
        return Line(stage.name, state, text, cure, seconds, figures or {}, details)

    here = threading.get_ident()

    def fail_late() -> None:
        frame = sys._current_frames()[here]
        late = f"it did not end in {stage.seconds:g} s"
        fail(line("failed", late, stage.cure, details="".join(traceback.format_stack(frame))))

    with _limited(stage.seconds, fail_late):
        try:
            result = stage.run(context)
            mine = line("ok", result.text, figures=result.figures)
        except NotRun as why:
            mine = line("not run", str(why))
        except Exception as error:
            printed = error.printed if isinstance(error, Fault) else ""
            details = printed + traceback.format_exc()
            fail(line("failed", *described(error, stage), details=details))
            return None
        agreed: Line = context.gather(mine)[0]
    return agreed


@contextmanager
def _limited(seconds: float, late: Callable[[], None]) -> Iterator[None]:
    """Calls a function on another thread unless the block ends in time."""
    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def verify_under_torchrun(
    names: Sequence[str], output: Path | None, tell: Tell, note: Tell
) -> NoReturn:
    """Runs the stages on the ranks that torchrun started, and ends this process.

    Args:
        names: names of the stages.
        output: see `run_stages`.
        tell: function that takes lines, on rank 0 and on a rank that fails.
        note: function that takes the lines of other ranks, until they fail.
    """
    with ScratchFolder(_SCRATCH) as folder:
        context = join_ranks(0, 0, None, folder)

        def fail(line: Line) -> None:
            try:
                tell(line)
            except ValueError as error:
                # On a thread of a stage that hangs, nobody would catch it.
                sys.stderr.write(f"distca verify: {error}\n")
            finally:
                _end(1)

        run_stages(chosen(names), context, output, tell if context.rank == 0 else note, fail)
    _end(0)


def _end(status: int) -> NoReturn:
    """Ends this process without the goodbyes of process groups: a peer may be dead."""
    sys.stdout.flush()
    os._exit(status)


def verify_machine(ranks: int, names: Sequence[str], output: Path | None, tell: Tell) -> None:
    """Starts ranks on this machine, and tells what they find.

    Args:
        ranks: processes, each with a GPU if there are any.
        names: names of the stages.
        output: see `run_stages`.
        tell: function that takes the line of each stage.
    """
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with ScratchFolder(_SCRATCH) as folder:
        try:
            for rank in range(ranks):
                ours, theirs = Pipe()
                pipes.append(ours)
                start_process(processes, _serve, rank, ranks, names, output, folder, pipe=theirs)
            _follow(processes, pipes, names, folder, tell)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _serve(
    rank: int, size: int, names: Sequence[str], output: Path | None, folder: Path, pipe: Connection
) -> None:
    """Runs a rank of `verify_machine`: the main function of its process."""
    own = folder / f"rank {rank}"
    own.mkdir()
    # Kept open: a signal writes to it, even if this process hangs in a library.
    stacks = (own / _STACKS).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    pipe.send(_STARTED)
    context = join_ranks(rank, size, str(folder / "store"), own)
    pipe.send(_JOINED)

    def fail(line: Line) -> None:
        pipe.send(line)
        # Until this process is killed: others would fail as its peers.
        signal.pause()

    def tell(line: Line) -> None:
        if rank == 0:
            pipe.send(line)

    run_stages(chosen(names), context, output, tell, fail)
    pipe.send(None)
    # Until all have ended.
    signal.pause()


def _follow(
    processes: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    names: Sequence[str],
    folder: Path,
    tell: Tell,
) -> None:
    """Tells lines until all ranks have ended or one has failed.

    A rank that fails waits for its end. So the first process that ends by itself is what others
    fail of.
    """
    left = dict(zip(pipes, range(len(pipes)), strict=True))
    reached: dict[int, str] = {}
    due = time.monotonic() + _SECONDS_TO_JOIN
    told: list[str] = []
    failures: dict[int, Line] = {}
    died: int | None = None
    while left:
        joining = {rank for rank in left.values() if reached.get(rank) != _JOINED}
        until_due = max(due - time.monotonic(), 0.0) if joining else None
        ready = wait(list(left), _FURTHER_FAILURES if failures else until_due)
        if failures and not ready:
            break
        if joining and not ready:
            rank = min(joining - reached.keys(), default=min(joining))
            failures[rank] = _late(names[0], rank in reached)
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = left[pipe]
            try:
                line = pipe.recv()
            except (EOFError, OSError):
                del left[pipe]
                if died is None:
                    died, failures[rank] = rank, _death(processes[rank], names[len(told)])
                continue
            if isinstance(line, str):
                reached[rank] = line
            elif line is None:
                del left[pipe]
            elif line.state == "failed":
                failures[rank] = line
                del left[pipe]
            else:
                told.append(line.stage)
                tell(line)
    if failures:
        rank = min(failures) if died is None else died
        where = f"rank {rank}: " if len(pipes) > 1 else ""
        failed = failures[rank]
        details = f"{failed.details}\n{_stacks(processes, folder)}"
        tell(replace(failed, text=where + failed.text, details=details))


def _stacks(processes: Sequence[BaseProcess], folder: Path) -> str:
    """Returns where the threads of all ranks are that are still there."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    # They write at once, unless they are stopped.
    time.sleep(_SECONDS_OF_STACKS)
    files = {rank: folder / f"rank {rank}" / _STACKS for rank in range(len(processes))}
    return "\n".join(
        f"rank {rank}:\n{file.read_text()}" for rank, file in files.items() if file.exists()
    )


def _late(stage: str, has_started: bool) -> Line:
    """The line of the first stage if ranks do not find each other."""
    what = "find the other ranks" if has_started else "start"
    text = f"it did not {what} in {_SECONDS_TO_JOIN} s"
    return Line(stage, "failed", text, "see whether its process is stopped (ps)", 0.0, {})


def _death(process: BaseProcess, stage: str) -> Line:
    """The line of a stage in which a process ended."""
    process.join()
    code = process.exitcode
    why = f": {_KILLED}" if code == -signal.SIGKILL else ""
    return Line(stage, "failed", f"its process ended with exit code {code}{why}", SEND, 0.0, {})


def chosen(names: Sequence[str]) -> list[Stage]:
    """Returns the stages of these names, in their order."""
    by_name: Mapping[str, Stage] = {stage.name: stage for stage in STAGES}
    return [by_name[name] for name in names]
