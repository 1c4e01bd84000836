"""The bytes that the simulator says core attention copies, against those that tensors' operations
read and write when the runtime's steps are run, with kernels that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distca.cost import rows as cost_rows
from distca.cost import volume
from distca.cost.memory import plan_memory
from distca.cost.rows import rank_rows
from distca.cost.volume import (
    BACKWARD_PHASES,
    FORWARD_PHASES,
    AttentionShape,
    BackwardInputs,
    plan_bytes,
)
from distca.plan import Plan
from distca.runtime import AttentionCall, Buffers, CoreAttention, EventCursor, build_exchange
from distca.schedule import ExecutionOptions, ScheduleConfig
from distca.simulate import plan_global_batch
from distca.simulate.copies import copy_traffic
from distca.transport.base import Channel, MessageSizes
from distca.transport.virtual import VirtualTransport
from support.batches import long_tailed_lengths

SHAPE = AttentionShape(8, 2, 64, 2)
CPU = torch.device("cpu")
MOVES_NOTHING = {
    *("view", "reshape", "_reshape_alias", "slice", "split", "split_with_sizes", "select"),
    *("unsqueeze", "detach", "alias", "empty", "new_empty", "as_strided"),
}
ELEMENTWISE = {"add_", "sub_", "exp", "mul", "clamp_", "div", "add", "log"}


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write; those of row indices, and weights that are
    broadcast over a row, are left out."""

    paused = False

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if not Traffic.paused and name not in MOVES_NOTHING:
            self.nbytes += self._of(name, args, result)
        return result

    @staticmethod
    def _of(name: str, args: Any, result: Any) -> int:
        if name == "index_put_":
            return 2 * moved_bytes(args[2])
        if name == "_embedding_bag_forward_only":
            # Each part is read, and each row written.
            written, row = moved_bytes(result[0]), moved_bytes(args[0][:1])
            return written + len(args[1]) * row
        written = moved_bytes(result)
        if name in ("index_select", "index", "cat", "clone"):
            return 2 * written
        if name in ("copy_", "_to_copy"):
            return written + moved_bytes(args[1] if name == "copy_" else args[0])
        if name in ("index_copy_", "index_add_"):
            return (2 if name == "index_copy_" else 3) * moved_bytes(args[3])
        if name == "zero_":
            return written
        assert name in ELEMENTWISE, f"{name} is not counted"
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        return written + sum(moved_bytes(t) for t in tensors if t.shape == result.shape)


def moved_bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.dtype == torch.int64 else tensor.numel() * tensor.element_size()


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    def quiet(*args: Any, **kwargs: Any) -> Any:
        Traffic.paused = True
        try:
            return function(*args, **kwargs)
        finally:
            Traffic.paused = False

    return quiet


class Links(VirtualTransport):
    """What moves messages does not count."""

    def _put(self, channel: Channel, sizes: MessageSizes) -> None:
        uncounted(super()._put)(channel, sizes)


class NoKernel:
    """Its results have no values."""

    @staticmethod
    @uncounted
    def forward(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return rest[-1] or (torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[:2]))

    @staticmethod
    @uncounted
    def backward(*tensors: Any) -> tuple[torch.Tensor, ...]:
        into: tuple[torch.Tensor, ...] = tensors[-1]
        return into


def rows(count: int, heads: int) -> torch.Tensor:
    return torch.zeros(count, heads, SHAPE.head_dim, dtype=torch.bfloat16)


def measured(plan: Plan, inputs: BackwardInputs) -> dict[str, list[int]]:
    """Bytes that each rank reads and writes in a layer, by direction."""
    others: list[VirtualTransport] = []
    calls: list[AttentionCall] = []
    for rank in range(plan.world_size):
        buffers = Buffers(CPU, headroom=0.0)
        transport = Links(rank, others, plan.world_size, CPU)
        attention = CoreAttention(transport, NoKernel(), buffers, backward=inputs)  # type: ignore[arg-type]
        attention.reserve(plan_memory(plan, SHAPE, inputs))
        calls.append(attention._call(EventCursor([build_exchange(plan, rank)]), 0, 0.3, {}))
    own, keys = plan.own_tokens_per_rank().tolist(), plan.placement.tokens_per_rank().tolist()
    heads, kv_heads = SHAPE.heads, SHAPE.kv_heads
    inputs = [
        (rows(q, heads), rows(k, kv_heads), rows(k, kv_heads))
        for q, k in zip(own, keys, strict=True)
    ]
    gradients = [rows(q, heads) for q in own]
    steps: dict[str, list[Callable[[int], Any]]] = {
        "forward": [
            lambda rank: calls[rank].dispatch(*inputs[rank]),
            lambda rank: calls[rank].compute(),
            lambda rank: calls[rank].combine(),
        ],
        "backward": [
            lambda rank: calls[rank].dispatch_backward(gradients[rank]),
            lambda rank: calls[rank].compute_backward(),
            lambda rank: calls[rank].combine_backward(),
        ],
    }
    found = {}
    for direction, mine in steps.items():
        traffic = [Traffic() for _ in calls]
        for step in mine:
            for rank in range(plan.world_size):
                with traffic[rank]:
                    step(rank)
        found[direction] = [each.nbytes for each in traffic]
    return found


@pytest.mark.parametrize(
    ("piece_bytes", "piece_rows", "inputs"),
    [
        (2**18, 2**20, "resend"),
        (2**18, 2**20, "keep"),
        (0, 32, "resend"),
        (0, 2**20, "resend"),
        (0, 32, "keep"),
    ],
)
@pytest.mark.parametrize("free_placement", [True, False])
@pytest.mark.parametrize("scheduler", ["packed", "per-document-cp", "greedy", "tiles"])
def test_the_simulator_counts_what_the_runtime_copies(
    scheduler: str,
    free_placement: bool,
    piece_bytes: int,
    piece_rows: int,
    inputs: BackwardInputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of both kinds to some ranks are put together, or written in pieces; kernel calls gather
    rows of both memories, or copy them in pieces."""
    monkeypatch.setattr(volume, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(cost_rows, "PIECE_ROWS", piece_rows)
    options = ExecutionOptions(scheduler, ping_pong=False, free_placement=free_placement)
    lengths = long_tailed_lengths(0, 4 * 2048, 500, 8192)
    planned = plan_global_batch([lengths], 1, 4, ScheduleConfig(shape=SHAPE), options)
    (plan,) = planned.ticks[0].plans
    phases = plan_bytes(plan, SHAPE, inputs).phases
    expected = {}
    for direction, names in (("forward", FORWARD_PHASES), ("backward", BACKWARD_PHASES)):
        # What is sent is packed in messages, what arrives is unpacked.
        once = np.sum([phases[p].sum(axis=0) + phases[p].sum(axis=1) for p in names], axis=0)
        copied = copy_traffic(rank_rows(plan), SHAPE, direction, inputs)  # type: ignore[arg-type]
        expected[direction] = (2 * once + copied).tolist()
    assert measured(plan, inputs) == expected
    q, kv = rank_rows(plan)
    if scheduler == "tiles":
        calls = [call for each in (q, kv) for call in each.calls]
        copied_at_once = np.any([call.overwritten for call in calls])
        assert copied_at_once == (piece_rows > 32)
    if scheduler == "tiles" and not free_placement:
        # Outputs merge, and gradients are sums, on servers and at owners.
        assert q.of_local.members.any()
        assert kv.of_received.members.any()
