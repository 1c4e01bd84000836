"""When gradients are reduced: once a step, during a chunk's last backward pass and not before.

Losses do not tell. megatron-core counts in its first batch how often each gradient comes while
reduction is allowed, and later starts at that count: allowed one micro-batch early it still starts
in the last, until a run's number of micro-batches changes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from support.models import make_run, memory_stream, parse

MICRO_BATCHES = 3
OVERLAP = "--distca --overlap-grad-reduce --seq-length 128".split()
LAYOUTS = {
    "DP2": (f"--global-batch-size {2 * MICRO_BATCHES}", 2 * 128),
    "PP2-VPP2": (
        f"--global-batch-size {MICRO_BATCHES} --num-layers 4 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        128,
    ),
}


@dataclass
class Seen:
    """What a rank saw of a step, by model chunk.

    Attributes:
        allowed: for each backward pass whether what it makes may be reduced.
        started: for each start of a bucket's reduction during which backward pass; None: in none.
        buckets: how many there are.
    """

    allowed: dict[int, list[bool]] = field(default_factory=dict)
    started: dict[int, list[int | None]] = field(default_factory=dict)
    buckets: dict[int, int] = field(default_factory=dict)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_reduced_once_and_during_the_last_backward_pass(ranks, layout) -> None:
    flags, window = LAYOUTS[layout]
    lengths = [window] * 2 * MICRO_BATCHES
    results = ranks.run(reductions, [*OVERLAP, *flags.split()], lengths, world_size=2)
    chunks = [0, 1] if "VPP" in layout else [0]
    for steps in results:
        for number, seen in enumerate(steps):
            assert sorted(seen.allowed) == chunks
            for chunk, buckets in seen.buckets.items():
                assert seen.allowed[chunk] == [False] * (MICRO_BATCHES - 1) + [True]
                # megatron-core waits for the end of its first step.
                when = None if number == 0 else MICRO_BATCHES - 1
                assert seen.started[chunk] == [when] * buckets


def reductions(flags: list[str], lengths: list[int]) -> list[Seen]:
    """Two steps, as this rank saw them; collective."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets
    from megatron.core.pipeline_parallel import schedules

    from megatron_patches.pipeline.tick_pipeline import _GlobalBatch
    from support import training

    args = parse(flags)
    training.initialize(args)
    run, _ = make_run(args, memory_stream(lengths))
    chunk_of = {id(b): n for n, chunk in enumerate(run.model) for b in chunk.bucket_groups}
    steps: list[Seen] = []
    running: list[int] = []

    def backward(self: _GlobalBatch, work: Any, current: Any) -> Any:
        running.append(work.chunk)
        steps[-1].allowed.setdefault(work.chunk, [])
        try:
            return original_backward(self, work, current)
        finally:
            running.pop()

    def backward_step(*arguments: Any) -> Any:
        groups = run.model[running[-1]].bucket_groups
        (allowed,) = {group.is_last_microbatch for group in groups}
        steps[-1].allowed[running[-1]].append(allowed)
        return original_step(*arguments)

    def start(group: Buckets, *arguments: Any, **options: Any) -> None:
        chunk = chunk_of[id(group)]
        during = len(steps[-1].allowed[chunk]) - 1 if running == [chunk] else None
        steps[-1].started.setdefault(chunk, []).append(during)
        original_start(group, *arguments, **options)

    original_backward, original_step = _GlobalBatch._backward, schedules.backward_step
    original_start = Buckets.start_grad_sync
    with (
        mock.patch.object(_GlobalBatch, "_backward", backward),
        mock.patch.object(schedules, "backward_step", backward_step),
        mock.patch.object(Buckets, "start_grad_sync", start),
    ):
        for _ in range(2):
            buckets = {n: len(chunk.bucket_groups) for n, chunk in enumerate(run.model)}
            steps.append(Seen(buckets=buckets))
            training.train_step(run)
    run.data.close()
    return steps


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("aligned", [False, True])
def test_when_gradients_are_reduced(stage: int, aligned: bool) -> None:
    """As in Megatron's own schedules: with a `grad_sync_func` only the first stage reduces during
    its last backward pass, and the others afterwards; never twice."""
    from megatron_patches.pipeline.tick_pipeline import _GradientSync

    held = [False]
    events: list[str] = []

    @contextlib.contextmanager
    def no_sync():
        held[0] = True
        yield
        held[0] = False

    chunk = SimpleNamespace(parameters=lambda: "parameters")
    launch = (lambda parameters: events.append(f"launch {parameters}")) if aligned else None
    config = SimpleNamespace(no_sync_func=no_sync, grad_sync_func=launch)
    sync = _GradientSync([chunk], config, first_stage=stage == 0)
    for last in (False, True):
        with sync.backward(last):
            events.append("held" if held[0] else "reduced as it comes")
    sync.finish()
    assert not held[0]
    if aligned and stage:
        assert events == ["held", "held", "launch parameters"]
    else:
        assert events == ["held", "reduced as it comes"]
