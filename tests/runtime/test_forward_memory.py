"""Core attention's memory where there is no backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distca.cost.memory import CoreAttentionMemory, plan_memory
from distca.cost.model_sizes import ModelSize
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Plan
from distca.runtime import Buffers, CoreAttention, ProgramRun, build_exchange
from distca.schedule.serving import nobody_holds, shard_evenly, shard_in_stripes, step_plan
from distca.simulate import CLUSTERS
from distca.simulate.serving import InferenceCosts, simulate_step
from distca.transport.virtual import VirtualTransport

SHAPE = AttentionShape(8, 2, 64, 2)
CPU, RANKS = torch.device("cpu"), 3


class NoKernel:
    """Its results have no values."""

    @staticmethod
    def forward(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return rest[-1] or (torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[:2]))


def turn(strategy: Any, cached: int, new: int) -> Plan:
    """Two sequences that have lain in stripes, and new tokens of each."""
    starts = np.array([cached, cached // 2])
    held = nobody_holds(RANKS)
    if cached:
        held = shard_in_stripes(np.zeros(2, dtype=np.int64), starts, np.arange(2), 7, RANKS)
    return step_plan(held, shard_evenly(starts, starts + new, RANKS), strategy, Mask())


def run_forward(plan: Plan, memory: CoreAttentionMemory) -> list[dict[str, int]]:
    """Runs a layer forward on all ranks in buffers of these sizes; bytes that each sends."""
    others: list[VirtualTransport] = []
    calls, inputs = [], []
    for rank in range(RANKS):
        buffers = Buffers(CPU, headroom=0.0)
        attention = CoreAttention(VirtualTransport(rank, others, RANKS, CPU), NoKernel(), buffers)  # type: ignore[arg-type]
        attention.reserve(memory)
        (exchange,) = buffers.place([build_exchange(plan, rank)])
        calls.append(attention._call(ProgramRun([exchange]), 0, 0.3, {}))
        own = int(plan.own_tokens_per_rank()[rank])
        keys = int(plan.placement.tokens_per_rank()[rank])
        rows = ((own, SHAPE.heads), (keys, SHAPE.kv_heads), (keys, SHAPE.kv_heads))
        inputs.append([torch.zeros(*each, SHAPE.head_dim, dtype=torch.bfloat16) for each in rows])
    steps: list[Callable[[int], Any]] = [
        lambda rank: calls[rank].start(*inputs[rank]),
        lambda rank: calls[rank].compute(),
        lambda rank: calls[rank].finish(),
    ]
    for step in steps:
        for rank in range(RANKS):
            step(rank)
    return [dict(transport.bytes_sent) for transport in others]


@pytest.mark.parametrize("strategy", ["pass-kv", "pass-q"])
@pytest.mark.parametrize(("cached", "new"), [(0, 300), (400, 30)])
def test_inference_runs_in_the_memory_of_its_plan(strategy: str, cached: int, new: int) -> None:
    """In a tenth less it does not run, and training takes more. Counted bytes are simulated."""
    plan = turn(strategy, cached, new)
    memory, training = plan_memory(plan, SHAPE, None), plan_memory(plan, SHAPE)
    counted = run_forward(plan, memory)
    assert memory.fits(training)
    assert memory.total(1) < 0.7 * training.total(1)
    for name in ("to_servers_receive", "slot"):
        less = replace(memory, **{name: getattr(memory, name) * 9 // 10})
        with pytest.raises((AssertionError, RuntimeError)):
            run_forward(plan, less)
    model = ModelSize(1, 512, SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim, 1024)
    simulated = simulate_step([plan], InferenceCosts(model, CLUSTERS["dgx-h100"])).bytes_sent
    for phase, sent in simulated.items():
        assert sent.tolist() == [each.get(phase, 0) for each in counted]
    assert set().union(*counted) <= set(simulated)
