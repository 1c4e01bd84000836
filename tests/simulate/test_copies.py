"""The time that copies of rows take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.rows import rank_rows
from distca.cost.volume import PHASES, plan_bytes
from distca.schedule import ExecutionOptions
from distca.simulate import (
    Ablation,
    simulate_ticks,
)
from distca.simulate.copies import copy_traffic
from support.simulated import IDEAL, costs_on, planned


@pytest.mark.parametrize("ablation", ["none", "single-stream", "signal"])
def test_copies_take_the_time_of_memory(ablation: Ablation) -> None:
    """Those of exchanges, around kernels, and of ping's keys that pong needs."""
    plan = planned([[12288, 4096, 100, 28]], 1, 2, ExecutionOptions("tiles"))
    slow = replace(IDEAL, copy_gb_per_s=1.0)
    took = [simulate_ticks(plan, costs_on(at), ablation=ablation).computed for at in (slow, IDEAL)]
    costs = costs_on(slow)
    expected, crosses = np.zeros(2), False
    for tick, plans, _ in plan.ticks:
        phases = PHASES[:2] if tick.direction == "forward" else PHASES[2:]
        for each in plans:
            moved = plan_bytes(each, costs.shape).phases
            once = sum(moved[p].sum(axis=0) + moved[p].sum(axis=1) for p in phases)
            # Signals are packed and unpacked as their messages are.
            expected += 2 * once + copy_traffic(rank_rows(each), costs.shape, tick.direction)
            own = each.own_tokens_per_rank()
            borrowed = each.placement.tokens_per_rank() - own
            crosses |= bool(borrowed.any())
            # Gathered and put together with the own ones; gradients come back to all of ping's.
            ways = (4, 2) if tick.direction == "forward" else (3, 4)
            rows = ways[0] * borrowed + ways[1] * own * (borrowed > 0)
            expected += rows * costs.shape.kv_row_bytes
    assert crosses
    assert took[0] - took[1] == pytest.approx(4 * expected / 1e9)
