"""A rank that trains small models on its simulated GPU, and what that asked of the GPU.

Its argument is a list, as JSON: jobs by name, rank, a folder for what ranks write. It writes `rank
N` there, pickled.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_patches.pipeline.tick_pipeline import TickPipeline
from support import training
from support.models import StepsDone, train
from support.ranks import forget_megatron
from support.simgpu import cuda, nccl
from support.simgpu.machine import packages_at
from support.simgpu.order import Call
from support.simgpu.packages import WITHOUT_PACKAGES
from support.simgpu.races import count, races

ON_GPUS = ["--bf16", "--transformer-impl", "local", *WITHOUT_PACKAGES]


@dataclass(frozen=True)
class Job:
    """A job for some ranks.

    Attributes:
        ranks: processes.
        flags: flags beside those of the small model.
        lengths: tokens of each document.
        steps: training steps.
        packages: packages of kernels that are installed.
        capability: compute capability of the GPUs.
    """

    ranks: int
    flags: Sequence[str]
    lengths: Sequence[int]
    steps: int = 1
    packages: Sequence[str] = ()
    capability: tuple[int, int] = cuda.HOPPER


@dataclass
class Trained:
    """What a rank saw of a job.

    Attributes:
        done: losses and gradients, on the CPU.
        races: accesses that nothing orders.
        launches: operators that the host started in the last step; a dedicated server has none,
            so they are of all that it did.
        scheduled: operators that it started in each step's forward and backward passes.
        syncs: how often the host waited then, by reason and place.
        process: its number in calls.
        calls: what it asked NCCL for, in order.
        kernels: operators of attention that ran.
    """

    done: StepsDone
    races: list[str]
    launches: int
    scheduled: list[int]
    syncs: dict[str, int]
    process: int
    calls: list[Call]
    kernels: set[str]


def train_here(job: Job, rank: int, store: str) -> Trained:
    """Runs a job as one of its ranks."""
    folders = [*packages_at(job.packages), *sys.path]
    # JSON has lists.
    capability = tuple(job.capability)
    with mock.patch.object(cuda, "capability", capability), mock.patch("sys.path", folders):
        return _train_here(job, rank, store)


def _train_here(job: Job, rank: int, store: str) -> Trained:
    torch.cuda.set_device(rank)
    nccl.calls.clear()
    file = dist.FileStore(store, job.ranks)  # type: ignore[attr-defined]
    limit = timedelta(seconds=120)
    dist.init_process_group("nccl", None, limit, job.ranks, rank, file)
    log: list[Any] = []
    # That of the last step.
    step: list[Any] = []
    scheduled: list[int] = []
    theirs, schedule = training.train_step, TickPipeline.__call__

    def noted_step(run: Any) -> Any:
        log.extend(_cut())
        step.clear()
        found = theirs(run)
        step.extend(_cut())
        log.extend(step)
        return found

    def noted_schedule(pipeline: TickPipeline, **how: Any) -> Any:
        step.extend(_cut())
        found = schedule(pipeline, **how)
        its = _cut()
        scheduled.append(count(its).launches)
        step.extend(its)
        return found

    cuda.native.start()
    with (
        mock.patch.object(training, "train_step", noted_step),
        mock.patch.object(TickPipeline, "__call__", noted_schedule),
    ):
        done = train([*ON_GPUS, *job.flags], job.lengths, job.steps)
    log.extend(cuda.native.stop())
    dist.destroy_process_group()
    forget_megatron()
    done.gradients = {name: (each.cpu(), split) for name, (each, split) in done.gradients.items()}
    spent = count(step or log)
    kernels = {name for name in count(log).operators if "flash" in name}
    counts = spent.launches, scheduled, dict(spent.syncs)
    return Trained(done, races(log), *counts, os.getpid(), list(nccl.calls), kernels)


def _cut() -> list[Any]:
    """Ends a log, begins the next one, and returns the first."""
    log: list[Any] = cuda.native.stop()
    cuda.native.start()
    return log


def main(argv: list[str]) -> None:
    """Runs all jobs that this rank is part of."""
    jobs, rank, folder = json.loads(argv[0])
    found = {}
    for name, job in jobs.items():
        if rank < job["ranks"]:
            found[name] = train_here(Job(**job), rank, f"{folder}/{name} store")
    (Path(folder) / f"rank {rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    # What it writes is of the module, not of `__main__`.
    from support.simgpu import training as module

    module.main(sys.argv[1:])
