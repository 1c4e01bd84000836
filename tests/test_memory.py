"""Core attention's memory stands still from step to step."""

from __future__ import annotations

import logging
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.distributed as dist
from random_plans import random_lengths, random_plan
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distca.attention import select_kernel
from distca.cost.memory import CoreAttentionMemory, plan_memory
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement, Plan, Tasks
from distca.runtime import Buffers, CoreAttention, ExchangeSlot, build_exchange
from distca.runtime.workspace import Workspace
from distca.transport import Channel, ChannelBytes, CollectiveTransport

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 8, 4, 64, 512
MIB = 2**20


class NewTensors(TorchDispatchMode):
    """Counts tensors of at least 1 MiB in memory of their own, but for those of the kernels."""

    def __init__(self, kernel) -> None:
        super().__init__()
        self.count = 0
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
                self.count += storage.nbytes() >= MIB and storage.data_ptr() not in given
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


def steps(plans: list[Plan]) -> list[int]:
    """The number of new large tensors of each plan's forward and backward pass."""
    counter = NewTensors(select_kernel("cpu"))
    transport = CollectiveTransport(dist.group.WORLD, CPU)
    attention = CoreAttention(transport, counter, Buffers(CPU))
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 4)
    for plan in plans:
        attention.reserve(plan_memory(plan, shape))
    counts = []
    for plan in plans:
        mine = build_exchange(plan, dist.get_rank())
        q, k, v, dout = (
            torch.randn(TOKENS, heads, HEAD_DIM, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        before = counter.count
        with counter:
            (exchange,) = attention.buffers.place([mine])
            out = attention(q, k, v, ExchangeSlot(exchange), 0.1)
            out.backward(dout)
        counts.append(counter.count - before)
    return counts


def test_nothing_is_allocated_in_steady_state(ranks) -> None:
    """50 steps of varying shapes: new are the model's own output and its queries' gradients, which
    have the size of the rank's tokens, and nothing of the exchange."""
    rng = np.random.default_rng(3)
    plans = [
        random_plan(rng, random_lengths(rng, 2 * TOKENS), 2, TOKENS, Mask(), block=128)
        for _ in range(50)
    ]
    moved = {plan_bytes(plan, AttentionShape(HEADS, KV_HEADS, HEAD_DIM, 4)).total for plan in plans}
    assert len(moved) > 40
    for counts in ranks.run(steps, plans, world_size=2):
        assert counts == [2] * 50


def test_buffers_grow_with_headroom_and_rarely(caplog) -> None:
    class Recorded:
        rank = 0

        def __init__(self) -> None:
            self.sizes: list[dict[Channel, ChannelBytes]] = []

        def reserve(self, sizes) -> None:
            self.sizes.append(dict(sizes))

    transport = Recorded()
    buffers = Buffers(CPU, nano_batches=2, head_groups=3)
    small = CoreAttentionMemory(1000, 2000, 3000, 4000, 5000, 6000, 7000)
    with caplog.at_level(logging.INFO):
        buffers.reserve(small, transport)
        grown = CoreAttentionMemory(*(size * 5 // 4 for size in (1000, 2000, 3000, 4000)))
        buffers.reserve(grown, transport)
    assert len(transport.sizes) == 1
    assert [message for message in caplog.messages if "grow from 0.0" in message]
    assert transport.sizes[0][Channel("to owners", 5)] == ChannelBytes(3840, 5120)
    assert set(transport.sizes[0]) == {
        Channel(way, slot) for way in ("to servers", "to owners") for slot in range(6)
    }
    for name in ("to_servers_receive", "slot", "indices"):
        more = CoreAttentionMemory(**{name: getattr(buffers.room, name) + 1})
        before = buffers.room
        buffers.reserve(more, transport)
        assert more.fits(buffers.room)
        assert before.fits(buffers.room)
    assert len(transport.sizes) == 4
    room = buffers.room
    of_slots = sum(getattr(room, field.name) for field in fields(room)[:5])
    assert buffers.nbytes == 6 * of_slots + room.scratch + 2 * room.indices
    assert [slot.nbytes for slot in buffers.slots] == [room.slot] * 6


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
    plan.validate()
    # Rows: a query 2 x 64 x 2 = 256 bytes, a key 128, a value 128, an LSE 8.
    memory = plan_memory(plan, AttentionShape(2, 1, 64, 2))
    inputs = 128 * 256 + 256 * 256
    assert memory.to_servers_send == memory.to_servers_receive == inputs + 128 * (512 + 8)
    assert memory.to_owners_send == memory.to_owners_receive == inputs
    # Server 1 has 384 queries and 512 keys: dout, out, q in two bytes, LSE, k, v; all gradients in
    # four. It sends nothing, so nothing comes back to it.
    backward = 384 * (3 * 256 + 8) + 512 * 256 + 384 * 512 + 512 * 512
    assert memory.slot == backward
    # Its call has these rows, too, and takes them all out of order.
    assert memory.scratch == backward
    assert memory.indices == 8 * (2 * 384 + 512)
    kept = plan_memory(plan, AttentionShape(2, 1, 64, 2), "keep")
    assert kept.to_servers_send == max(inputs, 128 * (512 + 8))


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
