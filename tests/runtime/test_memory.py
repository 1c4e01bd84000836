"""Core attention's memory stands still from step to step."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distca.attention import select_kernel
from distca.cost.kernel_memory import kernel_memory
from distca.cost.memory import MOST_INDICES, CoreAttentionMemory, aligned, plan_memory
from distca.cost.rows import rank_rows
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement, Plan, Tasks, validate_plan
from distca.runtime import Buffers, CoreAttention, build_exchange
from distca.runtime.workspace import Workspace
from distca.transport import Channel, ChannelBytes, CollectiveTransport
from megatron_patches.model.ping_pong import NanoBatchCoroutines
from support.programs import there_and_back
from support.random_plans import random_lengths, random_plan

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 8, 4, 64, 512
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 4)
MIB = 2**20


class NewTensors(TorchDispatchMode):
    """Counts large tensors in memory of their own, but for those of the kernels."""

    def __init__(self, kernel, least_bytes: int) -> None:
        super().__init__()
        self.count = 0
        self._least_bytes = least_bytes
        self._kernel, self._in_kernel = kernel, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not self._in_kernel:
                storage = leaf.untyped_storage()
                self.count += (
                    storage.nbytes() >= self._least_bytes and storage.data_ptr() not in given
                )
        return result

    def forward(self, *args, **kwargs):
        return self._within(self._kernel.forward, *args, **kwargs)

    def backward(self, *args, **kwargs):
        return self._within(self._kernel.backward, *args, **kwargs)

    def _within(self, function, *args, **kwargs):
        self._in_kernel = True
        result = function(*args, **kwargs)
        self._in_kernel = False
        return result


def make_attention(
    kernel: Any, device: torch.device, plans: list[tuple[Plan, ...]], size: int
) -> CoreAttention:
    """What has room for each of the plans; `size` is that of an element in bytes. Collective."""
    group = dist.group.WORLD if device == CPU else dist.new_group(backend="nccl")
    buffers = Buffers(device, len(plans[0]))
    attention = CoreAttention(CollectiveTransport(group, device), kernel, buffers)
    shape = replace(SHAPE, dtype_bytes=size)
    for plan in itertools.chain.from_iterable(plans):
        attention.reserve(plan_memory(plan, shape))
    return attention


def make_rows(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Queries, keys, values, and a gradient of their output."""
    return [
        torch.randn(TOKENS, heads, HEAD_DIM, dtype=dtype, device=device, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def run_step(
    attention: CoreAttention, plans: Sequence[Plan], rows: Sequence[list[torch.Tensor]]
) -> None:
    """Forward and backward of nano-batches that are under way together, each in its own slot."""
    exchanges = [build_exchange(plan, dist.get_rank()) for plan in plans]
    run = there_and_back(attention.buffers.place(exchanges))
    calls = [
        partial(attention, *of_nano[:3], run, 0.1, nano_batch=number)
        for number, of_nano in enumerate(rows)
    ]
    torch.autograd.backward(NanoBatchCoroutines(run).run(calls), [of_nano[3] for of_nano in rows])


def new_tensors(plans: list[tuple[Plan, ...]]) -> list[int]:
    """The number of new large tensors of each step.

    Args:
        plans: plans of each step, of each nano-batch.
    """
    counter = NewTensors(select_kernel("cpu"), MIB)
    attention = make_attention(counter, CPU, plans, 4)
    counts = []
    for nano_batches in plans:
        rows = [make_rows(torch.float32, CPU) for _ in nano_batches]
        before = counter.count
        with counter:
            run_step(attention, nano_batches, rows)
        counts.append(counter.count - before)
    return counts


def varying_plans(count: int, nano_batches: int, world_size: int) -> list[tuple[Plan, ...]]:
    rng = np.random.default_rng(3)
    made = [
        random_plan(
            rng, random_lengths(rng, world_size * TOKENS), world_size, TOKENS, Mask(), block=128
        )
        for _ in range(count * nano_batches)
    ]
    return list(zip(*[iter(made)] * nano_batches, strict=True))


@pytest.mark.parametrize("nano_batches", [1, 2], ids=["whole", "ping-pong"])
def test_nothing_is_allocated_in_steady_state(ranks, nano_batches: int) -> None:
    """50 plans of varying shapes: new are the model's own output and its queries' gradients, which
    have the size of the rank's tokens, and of the exchange only the sums that torch makes of the
    other rank's gradients, where this rank computes all its queries and some in several tasks.
    """
    plans = varying_plans(50 // nano_batches, nano_batches, 2)
    moved = {sum(plan_bytes(plan, SHAPE).total for plan in each) for each in plans}
    assert len(moved) > 0.8 * len(plans)
    sums = [sum(large_sums(plan) for plan in each) for each in plans]
    for rank, counts in enumerate(ranks.run(new_tensors, plans, world_size=2)):
        assert counts == [2 * nano_batches + int(each[rank]) for each in sums]


def large_sums(plan: Plan) -> np.ndarray:
    """Whether a rank makes sums for as many received queries as it has tokens, `[ranks]`."""
    q, _ = rank_rows(plan)
    return 1 * ((q.of_received.shared > 0) & (q.received >= TOKENS))


def allocations(plans: list[tuple[Plan, ...]]) -> list[tuple[int, int]]:
    """After each step on a GPU, how often its allocator asked the driver for memory, and how often
    it had to ask again."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    attention = make_attention(select_kernel("cuda"), device, plans, 2)
    rows = [make_rows(torch.bfloat16, device) for _ in plans[0]]
    seen = []
    for nano_batches in plans:
        run_step(attention, nano_batches, rows)
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        seen.append((stats["segment.all.allocated"], stats["num_alloc_retries"]))
    return seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_s_allocator_is_quiet_in_steady_state(ranks) -> None:
    """Not run on any GPU yet. Exchanges need two."""
    world_size = min(2, torch.cuda.device_count())
    plans = varying_plans(50, 2, world_size)
    # What kernels allocate themselves is of the size of their tasks: the most comes first.
    most = max(plans, key=lambda each: max(plan_memory(plan, SHAPE).scratch for plan in each))
    plans.insert(0, most)
    for seen in ranks.run(allocations, plans, world_size=world_size):
        assert seen[5:] == [seen[5]] * 46
        assert seen[-1][1] == 0


def test_buffers_grow_with_headroom_and_rarely(caplog) -> None:
    class Recorded:
        rank = 0

        def __init__(self) -> None:
            self.sizes: list[dict[Channel, ChannelBytes]] = []

        def reserve(self, sizes) -> None:
            self.sizes.append(dict(sizes))

    transport = Recorded()
    buffers = Buffers(CPU, nano_batches=2)
    small = CoreAttentionMemory(1000, 2000, 3000, 4000, 5000, 6000, 7000)
    with caplog.at_level(logging.INFO):
        buffers.reserve(small, transport)
        grown = CoreAttentionMemory(*(size * 5 // 4 for size in (1000, 2000, 3000, 4000)))
        buffers.reserve(grown, transport)
    assert len(transport.sizes) == 1
    megabytes = f"{buffers.nbytes / 1e6:.1f}"
    assert caplog.messages == [
        f"core attention's buffers grow from 0.0 to {megabytes} MB on every rank"
    ]
    assert transport.sizes[0][Channel("combine", 1)] == ChannelBytes(3840, 5120)
    assert set(transport.sizes[0]) == {
        Channel(direction, slot) for direction in ("dispatch", "combine") for slot in range(2)
    }
    for name in ("dispatch_receive", "slot", "indices"):
        more = CoreAttentionMemory(**{name: getattr(buffers.room, name) + 1})
        before = buffers.room
        buffers.reserve(more, transport)
        assert more.fits(buffers.room)
        assert before.fits(buffers.room)
    assert len(transport.sizes) == 4
    room = buffers.room
    of_slots = sum(getattr(room, field.name) for field in fields(room)[:5])
    assert buffers.nbytes == 2 * of_slots + room.scratch + 2 * room.indices
    assert [workspace.nbytes for workspace in buffers.workspaces] == [room.slot] * 2


def test_the_memory_of_a_plan_by_hand() -> None:
    """Two ranks of 256 tokens; rank 1 computes half of rank 0's queries."""
    lengths = np.array([256, 256])
    placement = Placement(
        np.array([0, 1]), np.array([0, 0]), np.array([256, 256]), np.array([0, 1]), world_size=2
    )
    tasks = Tasks.from_rows(
        [(0, 0, 128, 0, 128, 0), (0, 128, 256, 0, 256, 1), (1, 0, 256, 0, 256, 1)]
    )
    plan = Plan(lengths, placement, tasks)
    validate_plan(plan)
    # Rows: a query 2 x 64 x 2 = 256 bytes, a key 128, a value 128, an LSE 8, padded to 16.
    memory = plan_memory(plan, AttentionShape(2, 1, 64, 2))
    inputs = 128 * 256 + 256 * 256
    assert memory.dispatch_send == memory.dispatch_receive == inputs + 128 * (512 + 16)
    assert memory.combine_send == memory.combine_receive == inputs
    # Server 1 receives dout, out, q, LSE of 128 queries, and k, v of 256 keys, and has gradients of
    # 384 queries and 512 keys. It sends nothing, so nothing comes back to it.
    gradients = 384 * 256 + 512 * 256
    assert memory.slot == 128 * (3 * 256 + 16) + 256 * 256 + gradients
    # Its call's rows lie in two pieces, too short to be copied as such: those that arrived are
    # gathered apart, and overwrite others.
    assert memory.scratch == (384 + 128) * (3 * 256 + 16) + (512 + 256) * 256
    # Received rows have two indices each; taken ones have two, by memory and for both at once, and
    # two more if they overwrite others. Sums have each row of the call and one for each of its own;
    # so have outputs.
    taken = 2 * 384 + 2 * 128 + 2 * 512 + 2 * 256
    rows = 2 * 384 + taken + 2 * (384 + 512) + 384
    assert memory.indices == aligned(8 * (rows + MOST_INDICES))
    kept = plan_memory(plan, AttentionShape(2, 1, 64, 2), "keep")
    assert kept.dispatch_send == max(inputs, 128 * (512 + 16))
    # Kernels: gradients; a float32 sum and twice 16 bytes for each query, with 128 more for a task;
    # those of keys and values for two heads instead of one.
    assert kernel_memory(plan, AttentionShape(2, 1, 64, 2)).tolist() == [
        128 * 256 + 128 * 256 + (128 + 128) * (512 + 32) + 128 * 512,
        384 * 256 + 512 * 256 + (384 + 2 * 128) * (512 + 32) + 512 * 512,
    ]
    # Sums have whole steps of 32 elements, of 64 beyond 128; single heads need no others.
    assert kernel_memory(plan, AttentionShape(1, 1, 80, 2))[0] == (
        128 * 160 + 128 * 320 + (128 + 128) * (96 * 4 + 32)
    )
    assert kernel_memory(plan, AttentionShape(1, 1, 136, 2))[0] == (
        128 * 272 + 128 * 544 + (128 + 128) * (192 * 4 + 32)
    )


def test_a_workspace_hands_out_its_memory_once() -> None:
    workspace = Workspace(CPU)
    workspace.reserve(1024)
    first = workspace.take((3, 5), torch.float32)
    second = workspace.take((7,), torch.int64)
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all()
    assert second.data_ptr() - first.data_ptr() == 256
    with workspace.borrowed():
        third = workspace.take((512,), torch.uint8)
        assert workspace.owns(third)
        with pytest.raises(AssertionError, match="no room"):
            workspace.take((1,), torch.uint8)
    assert workspace.take((1,), torch.uint8).data_ptr() == third.data_ptr()
    workspace.clear()
    assert workspace.take((1,), torch.uint8).data_ptr() == first.data_ptr()
    assert not workspace.owns(torch.zeros(1))
