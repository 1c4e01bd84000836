"""Plans with steps, run on ranks or on virtual ones, and the dense attention they must equal."""

from __future__ import annotations

import numpy as np
import torch

from distca.attention import select_kernel
from distca.cost.steps import STEP_SLOTS, step_memory, stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Plan, SteppedPlan
from distca.plan.span import Int64s
from distca.runtime import Buffers, CoreAttention
from distca.runtime.messages import QAndKV
from distca.runtime.serving.step_exchange import SteppedExchange, build_stepped_exchange
from distca.runtime.serving.stepped_call import SteppedCall
from distca.schedule.serving.steps import step_program
from distca.transport import Transport
from distca.transport.virtual import VirtualTransport
from support.random_plans import dense_attention

SCALE, CPU = 0.3, torch.device("cpu")


def inputs(plan: Plan, shape: AttentionShape) -> list[torch.Tensor]:
    """Queries, keys and values of all rows, float64."""
    shape = shape.scattered(plan.head_groups)
    generator = torch.Generator().manual_seed(3)
    tokens = int(plan.lengths.sum())
    return [
        torch.randn(tokens, heads, shape.head_dim, generator=generator, dtype=torch.float64)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]


def rows_of(plan: Plan, rank: int) -> tuple[Int64s, Int64s]:
    """Global positions of a rank's queries, and of its keys."""
    at, found = plan.placement, []
    for pieces in (plan.own_pieces & (at.rank == rank), at.rank == rank):
        spans = [
            plan.document_offsets[at.document[n]] + np.arange(at.start[n], at.end[n])
            for n in np.flatnonzero(pieces)
        ]
        found.append(np.concatenate([np.arange(0), *spans]))
    return found[0], found[1]


class RankOfPlan:
    """A rank with its rows of a plan, its keys scattered over a larger tensor.

    Args:
        plan: plan with steps.
        transport: transport of the rank.
        shape: heads.
        dtype: dtype of the rows.
    """

    def __init__(
        self, plan: SteppedPlan, transport: Transport, shape: AttentionShape, dtype: torch.dtype
    ) -> None:
        self.transport = transport
        buffers = Buffers(CPU, STEP_SLOTS, headroom=0.0)
        self.core = CoreAttention(transport, select_kernel("cpu"), buffers)
        self.core.reserve(step_memory(plan, shape))
        queries, keys = rows_of(plan.plan, transport.rank)
        rng = np.random.default_rng(transport.rank)
        places = rng.permutation(len(keys) + 3)[: len(keys)]
        q, *kv = (each.to(dtype) for each in inputs(plan.plan, shape))
        self.tensors = QAndKV(
            [q[queries]],
            [each.new_full((len(keys) + 3, *each.shape[1:]), float("nan")) for each in kv],
        )
        for tensor, each in zip(self.tensors.kv, kv, strict=True):
            tensor[places] = each[keys]
        self.exchange: SteppedExchange = build_stepped_exchange(plan, transport.rank, places)

    def call(self) -> SteppedCall:
        """A call of core attention."""
        return SteppedCall(self.core, self.exchange, self.tensors, SCALE)


def run_virtually(
    plan: SteppedPlan, shape: AttentionShape, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Runs a plan on ranks of this process, checks each, and returns their outputs and LSE."""
    others, ranks = list[VirtualTransport](), plan.plan.world_size
    transports = [VirtualTransport(n, others, ranks, CPU) for n in range(ranks)]
    workers = [RankOfPlan(plan, each, shape, dtype) for each in transports]
    calls = [rank.call() for rank in workers]
    for event in step_program(plan.steps):
        for call in calls:
            call.do(event)
    for rank, call in zip(workers, calls, strict=True):
        check_rank(plan, rank.transport, call.outputs()[0].to(dtype), shape)
    return [call.outputs() for call in calls]


def check_rank(
    plan: SteppedPlan, transport: Transport, out: torch.Tensor, shape: AttentionShape
) -> None:
    """Holds a rank's outputs against dense attention, and its bytes against the plan's."""
    rank, whole = transport.rank, plan.plan
    queries, _ = rows_of(whole, rank)
    expected = dense_attention(*inputs(whole, shape), whole.lengths, whole.mask, SCALE)[queries]
    assert out.shape == expected.shape
    if len(queries):
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[out.dtype]
        assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()
    for phase, messages in stepped_bytes(plan, shape).messages.items():
        assert transport.bytes_sent[phase] == messages.sent()[rank]
        assert transport.bytes_received[phase] == messages.received()[rank]
