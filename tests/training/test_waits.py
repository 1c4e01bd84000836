"""No tick waits for a GPU: shown on CPUs, with tensors that note who reads them on the host."""

from __future__ import annotations

import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_patches.batches import micro_batch as micro_batches
from megatron_patches.pipeline.data_iterators import DataIterators
from support.models import make_run, memory_stream, parse
from support.pipelines import documents, flags_of
from support.ranks import forget_megatron

READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.nonzero,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.nonzero,
    torch.masked_select,
}
"""Functions that wait until a tensor of a GPU has its values."""

read: list[str] = []
"""Where such a function was called, of this process."""


class OnGpu(torch.Tensor):
    """A tensor that stands for one of a GPU, as all do that are computed from it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in READS:
            stack = traceback.extract_stack()
            where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack]
            # What Megatron reads once a step, between ticks and the optimizer's step, is its own.
            if any(each.endswith(" _compute") for each in where):
                read.append(f"{function.__name__} {where[-8:]}")
        return super().__torch_function__(function, types, args, kwargs or {})


def place(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Stands for the copy to a GPU."""
    return tensor.as_subclass(OnGpu)


@pytest.mark.parametrize("layout", ["PP2-DP2", "PP2-VPP2-DP2"])
def test_no_step_reads_what_is_on_the_gpu(ranks, layout: str) -> None:
    """And none waits for the device itself."""
    world_size, flags = flags_of(layout, 3)
    for found, waits, placed in ranks.run(
        reads_of_a_step, flags, documents(3), world_size=world_size
    ):
        assert found == []
        assert waits == 0
        assert placed >= 3 * len(("tokens", "labels", "loss_mask", "position_ids"))


def reads_of_a_step(flags: list[str], lengths: list[int]) -> tuple[list[str], int, int]:
    """Reads in a step's ticks, waits for the device, and number of tensors placed; collective."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import p2p_communication

    from support import training

    args = parse(flags)
    training.initialize(args)
    run, _ = make_run(args, memory_stream(lengths))
    for chunk in run.model:
        chunk.zero_grad_buffer()
        # As Megatron-LM's own loop has it.
        chunk.config.batch_p2p_sync = True
    ticks = run.data.train
    ticks.device = SimpleNamespace(type="stands for a GPU")
    read.clear()
    with (
        mock.patch.object(micro_batches, "place", side_effect=place) as placed,
        # On CPUs Megatron's modules have a torch.cuda of their own.
        mock.patch.object(p2p_communication.torch.cuda, "synchronize") as synchronize,
    ):
        run.data = DataIterators(ticks, None, None)
        training.forward_backward(run)
    ticks.close()
    dist.barrier()
    forget_megatron()
    return read, synchronize.call_count, placed.call_count
