"""Two ranks use the library in a loop. One is killed or stopped before an operation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from distca.library import Planner, Rollout, core_attention, share_documents
from support.forks import forking
from support.library_loops import BLOCK
from support.rollout_loops import hf_shape

_PATIENCE = 4.0
"""Seconds after which an operation with a stopped rank has failed."""

KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP


def what_the_other_raises(operation: str, fate: signal.Signals, folder: str) -> tuple[str, ...]:
    """Starts both ranks, and returns the error of rank 0 and that of its cause: type and text."""
    context = forking()
    mine, its = context.Pipe()
    ranks = [
        context.Process(target=_run, args=(rank, operation, fate, folder, its), daemon=True)
        for rank in (0, 1)
    ]
    try:
        for each in ranks:
            each.start()
        its.close()
        assert mine.poll(100), f"{operation}: rank 0 waits on"
        found: tuple[str, ...] = mine.recv()
        return found
    finally:
        for each in ranks:
            each.kill()
            each.join()


def _run(rank: int, operation: str, fate: signal.Signals, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    # Only the time limit ends the making of a group.
    waits = fate == STOPPED or operation == "Planner"
    patience = timedelta(seconds=_PATIENCE if waits else 100)
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", None, patience, 2, rank, store)
    dist.barrier()
    run = _PREPARED[operation]()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), fate)
    try:
        run()
        found: tuple[str, ...] = ("no error",)
    except BaseException as error:
        cause = error.__cause__
        found = type(error).__name__, str(error), type(cause).__name__, str(cause)
    pipe.send(found)
    # Without the goodbyes of the process group.
    os._exit(0)


def _batch(planner: Planner) -> Any:
    return planner.place([Rollout(torch.arange(1, 700)), Rollout(torch.arange(900, 1500))])


def _attention(backward: bool) -> Callable[[], object]:
    shape = hf_shape()
    planner = Planner(shape, block=BLOCK)
    batch, rows = _batch(planner), {}
    for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
        rows[name] = torch.ones(len(batch.tokens), heads, shape.head_dim, requires_grad=True)

    def forward() -> torch.Tensor:
        # It keeps the planner.
        assert planner.masks
        return core_attention(*rows.values(), batch).sum()

    if not backward:
        return forward
    total = forward()
    return lambda: (planner, total.backward())


def _placing() -> Callable[[], object]:
    planner = Planner(hf_shape(), block=BLOCK)
    return lambda: _batch(planner)


def _with_values(
    use: Callable[[Any, torch.Tensor], object], of_tokens: bool = False
) -> Callable[[], object]:
    planner = Planner(hf_shape(), block=BLOCK)
    batch = _batch(planner)
    count = len(batch.tokens if of_tokens else batch.predictions.rows)
    return lambda: (planner, use(batch, torch.zeros(count)))


def _backward_of_gather() -> Callable[[], object]:
    planner = Planner(hf_shape(), block=BLOCK)
    batch = _batch(planner)
    values = torch.zeros(len(batch.predictions.rows), requires_grad=True)
    total = torch.cat(list(batch.gather_rollouts(values).values())).sum()
    return lambda: (planner, total.backward())


_PREPARED: dict[str, Callable[[], Callable[[], object]]] = {
    "core_attention": lambda: _attention(backward=False),
    "core_attention's backward pass": lambda: _attention(backward=True),
    "Planner": lambda: lambda: Planner(hf_shape(), block=BLOCK),
    "place": _placing,
    "share_documents": lambda: lambda: share_documents([torch.arange(9)]),
    "gather": lambda: _with_values(lambda batch, values: batch.gather(values), of_tokens=True),
    "gather_rollouts": lambda: _with_values(lambda batch, values: batch.gather_rollouts(values)),
    "gather_rollouts' backward pass": _backward_of_gather,
    "sum_rollouts": lambda: _with_values(lambda batch, values: batch.sum_rollouts(values)),
}

OPERATIONS = tuple(_PREPARED)
