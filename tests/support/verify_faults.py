"""Faults of a GPU machine, each put in while a stage of `distca verify` runs on a simulated GPU.

Run as a module it writes the line of each fault's stage to standard output, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

from distca.attention import flash
from distca.commands.verify import answers
from distca.commands.verify.ranks import chosen, join_ranks, run_stages
from distca.commands.verify.stage import Context, Line
from distca.inference import cuda_graphs
from distca.inference.model_runner import ModelRunner

FAULTS: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager[Any]]]] = {}
"""Stage in which a fault shows, and what puts it in, by the fault's name."""


def fault(stage: str) -> Callable[[Any], Any]:
    def take(function: Callable[[], Iterator[None]]) -> Any:
        FAULTS[function.__name__] = stage, contextlib.contextmanager(function)
        return function

    return take


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
    run = cuda_graphs._Recording.run

    def stale(self: Any, ids: Any, positions: Any, step: Any) -> Any:
        return run(self, ids * 0, positions, step)

    with (
        mock.patch.object(cuda_graphs._Recording, "run", stale),
        mock.patch.object(answers, "FAMILIES", {"llama": "pass-kv"}),
    ):
        yield


@fault("memory")
def a_pool_is_larger_than_the_memory() -> Iterator[None]:
    room = ModelRunner.room
    with mock.patch.object(ModelRunner, "room", lambda self, config: 2 * room(self, config)):
        yield


@fault("overlap")
def a_stage_does_not_end() -> Iterator[None]:
    yield


def line_of(name: str, context: Context) -> Line:
    """Returns the line of a fault's stage."""
    stage_name, put_in = FAULTS[name]
    [stage] = chosen([stage_name])
    lines: list[Line] = []
    if name == "a_stage_does_not_end":
        ended = threading.Event()
        stage = replace(stage, seconds=0.2, run=lambda _: ended.wait())

        def fail(line: Line) -> None:
            lines.append(line)
            ended.set()
    else:
        fail = lines.append
    folder = context.folder / name
    folder.mkdir()
    with put_in():
        run_stages([stage], replace(context, folder=folder), None, lines.append, fail)
    return lines[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as told:
        rank = join_ranks(0, 1, f"{told}/store", Path(told))
        found = {name: asdict(line_of(name, rank)) for name in FAULTS}
    sys.stdout.write(json.dumps(found))
