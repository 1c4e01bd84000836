"""The ticks of a pipeline: their bytes, evaluation, reruns, failures, and what stages pass on."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.pipeline.data_iterators import DataIterators
from support.models import make_run, memory_stream, parse
from support.pipelines import VARIANTS, documents, flags_of, plain
from support.ranks import forget_megatron


def test_bytes_of_every_tick(ranks) -> None:
    """What a tick's plan says that each rank sends is what its transport counts in that tick."""
    for layout in ("PP2-DP2", "PP2-VPP2-DP2"):
        world_size, flags = flags_of(layout, 5)
        for extra in ([], VARIANTS["recompute the first"].split()):
            results = ranks.run(
                bytes_of_ticks, [*flags, *extra], documents(5), world_size=world_size
            )
            for planned, counted in results:
                assert planned == counted
            assert sum(sum(tick.values()) for planned, _ in results for tick in planned) > 0


def bytes_of_ticks(flags: list[str], lengths: list[int]) -> tuple[list, list]:
    """Bytes sent by this rank in each tick by phase, as planned and as counted; collective."""
    import torch.distributed as dist

    from megatron_patches.batches.ticks import PlannedIterator, TickInput
    from megatron_patches.pipeline.tick_pipeline import TickPipeline
    from support import training

    args = parse(flags)
    training.initialize(args)
    run, made = make_run(args, memory_stream(lengths))
    transport = made.runtime.core_attention.transport
    planned, counted = [], []

    class Watched(PlannedIterator):
        """Notes the counts when a tick ends, which is when the next one is asked for."""

        def __init__(self, ticks: PlannedIterator) -> None:
            self.runtime, self.announce, self._inner = ticks.runtime, None, ticks

        def __next__(self) -> TickInput:
            counted.append(dict(transport.bytes_sent))
            following = next(self._inner)
            planned.append({k: v for k, v in following.bytes_sent.items() if v})
            return following

    assert isinstance(run.forward_backward_func, TickPipeline)
    run.data = DataIterators(Watched(run.data.train), None, None)
    for chunk in run.model:
        chunk.zero_grad_buffer()
    training.forward_backward(run)
    counted.append(dict(transport.bytes_sent))
    dist.barrier()
    forget_megatron()
    each = [
        {k: after[k] - before.get(k, 0) for k in after if after[k] > before.get(k, 0)}
        for before, after in itertools.pairwise(counted)
    ]
    return planned, each


def test_an_evaluation_has_forward_ticks_only(ranks) -> None:
    for layout in ("PP2-DP2", "PP2-VPP2"):
        world_size, flags = flags_of(layout, 5)
        found = ranks.run(evaluation_loss, flags, documents(5), world_size=world_size)
        assert found == pytest.approx([plain(ranks, 5).losses[0]] * world_size, rel=1e-5)


def test_a_global_batch_can_be_run_again(ranks) -> None:
    """As Megatron-LM's loop does to validate a result: with the ticks that it kept."""
    for layout in ("PP2-DP2", "PP2-VPP2"):
        world_size, flags = flags_of(layout, 3)
        found = ranks.run(losses_of_reruns, flags, documents(3), world_size=world_size)
        assert found == [[pytest.approx(plain(ranks, 3).losses[0], rel=1e-5)] * 3] * world_size


def losses_of_reruns(flags: list[str], lengths: list[int]) -> list[float]:
    """Of the same global batch, run again and again; collective."""
    import torch.distributed as dist

    from support import training

    args = parse(flags)
    training.initialize(args)
    run, _ = make_run(args, memory_stream(lengths))
    stream = run.data.train
    first = next(stream)
    kept = [first, *(next(stream) for _ in first.schedule.ticks[1:])]

    class Again:
        """In the form of Megatron's `RerunDataIterator`."""

        iterable = stream
        ticks = itertools.cycle(kept)

        def __next__(self) -> Any:
            return next(self.ticks)

    run.data = DataIterators(Again(), None, None, end=run.data.end)
    losses = []
    for _ in range(3):
        for chunk in run.model:
            chunk.zero_grad_buffer()
        losses.append(training.forward_backward(run)["lm loss"])
    stream.close()
    dist.barrier()
    forget_megatron()
    return losses


def test_a_failed_exchange_stops_the_step(ranks) -> None:
    """Before the optimizer, and before the loss that it made not-a-number is blamed."""
    world_size, flags = flags_of("PP2", 2)
    results = ranks.run(step_with_failed_exchange, flags, documents(2), world_size=world_size)
    assert results == [("rank 1 did nothing", 0, True)] * world_size


def step_with_failed_exchange(flags: list[str], lengths: list[int]) -> tuple[str, int, bool]:
    """The error, the iteration, and whether the weights are as before; collective."""
    import torch
    import torch.distributed as dist

    from distca.transport import TransportError
    from support import training

    args = parse(flags)
    training.initialize(args)
    run, made = make_run(args, memory_stream(lengths))

    def check(finished: bool) -> None:
        raise TransportError("rank 1 did nothing")

    made.runtime.core_attention.transport.check = check
    for parameter in run.model[0].parameters():
        parameter.data[(0,) * parameter.dim()] = torch.nan
    before = [parameter.detach().clone() for parameter in run.model[0].parameters()]
    said = ""
    try:
        training.train_step(run)
    except TransportError as error:
        said = str(error)
    after = run.model[0].parameters()
    same = all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)
    )
    run.data.close()
    dist.barrier()
    forget_megatron()
    return said, args.iteration, same


def test_all_stages_meet_before_some_pass_on(ranks) -> None:
    """NCCL makes a group's communicator at its first call, which must be every rank's."""
    world_size, flags = flags_of("PP4", 2)
    calls = ranks.run(calls_between_stages, flags, documents(2), world_size=world_size)
    assert [row[0] for row in calls] == ["all_reduce"] * world_size
    assert all("P2POp" in row and row.count("all_reduce") == 1 for row in calls)


def calls_between_stages(flags: list[str], lengths: list[int]) -> list[str]:
    """What this rank calls on the pipeline's group in a step, in turn; collective."""
    from unittest import mock

    import torch.distributed as dist
    from megatron.core import parallel_state

    from support import training

    args = parse(flags)
    training.initialize(args)
    run, _ = make_run(args, memory_stream(lengths))
    stages = parallel_state.get_pipeline_model_parallel_group()
    called = []

    def noting(name: str):
        function = getattr(dist, name)

        def noted(*arguments, **options):
            if any(each is stages for each in (*arguments, *options.values())):
                called.append(name)
            return function(*arguments, **options)

        return mock.patch.object(dist, name, noted)

    with contextlib.ExitStack() as patched:
        for name in ("all_reduce", "P2POp"):
            patched.enter_context(noting(name))
        training.train_step(run)
    run.data.close()
    dist.barrier()
    forget_megatron()
    return called


def evaluation_loss(flags: list[str], lengths: list[int]) -> float:
    """The loss of one global batch, without its gradients; collective."""
    import torch
    import torch.distributed as dist

    from megatron_patches.batches.ticks import PlannedIterator
    from megatron_patches.loop.data import window_layout
    from megatron_patches.pipeline.planned_data import PlannedData
    from support import training

    args = parse(flags)
    training.initialize(args)
    stream, device = memory_stream(lengths), torch.device("cpu")
    run, _ = make_run(args, stream)
    planned = PlannedData.start(DistcaConfig.from_args(args), args, window_layout(args), device)
    maker = planned.maker(stream, forward_only=True)
    ticks = PlannedIterator(maker, 0, planned.micro_batches_at, device)
    run.data = DataIterators(None, ticks, None)
    args.eval_iters = 1
    losses = training.evaluate(run, "valid")
    ticks.close()
    dist.barrier()
    forget_megatron()
    return losses["lm loss"]
