"""Simulated iterations with dedicated attention servers, which hold no model."""

from __future__ import annotations

import numpy as np
import pytest

from distca.schedule import ExecutionOptions, PlannedGlobalBatch, ScheduleConfig
from distca.simulate import ModelCosts, plan_global_batch, simulate_ticks
from support.simulated import IDEAL, costs_on

WINDOWS = [np.array([12_288, 2048, 1024, 1024])] * 2


def planned(costs: ModelCosts, dedicated: int, speed: float = 1.0) -> PlannedGlobalBatch:
    config = ScheduleConfig(
        tolerance=0.02,
        shape=costs.shape,
        cost_model=costs.cluster.attention_cost(costs.shape),
        server_speeds=(1.0,) * 2 + (speed,) * dedicated,
    )
    return plan_global_batch(WINDOWS, 1, 2, config, ExecutionOptions("tiles"), dedicated=dedicated)


def test_they_compute_attention_alone_and_hold_no_model() -> None:
    costs = costs_on(IDEAL)
    outcome = simulate_ticks(planned(costs, 2), costs)
    assert (outcome.gpus, outcome.tokens) == (4, 2 * 16_384)
    linear = 2 * costs.model.layers * 8192 * sum(costs.layer_seconds())
    linear += 2 * 8192 * sum(costs.head_seconds())
    attention = outcome.computed - [linear, linear, 0, 0]
    # Two dedicated servers have half of all attention.
    assert attention.min() > 0.9 * attention.max() > 0
    state = costs.state_bytes(0, 1, 2)
    assert outcome.memory_bytes[:2].min() > state
    assert 0 < outcome.memory_bytes[2:].max() < outcome.memory_bytes[:2].min() - state


def test_more_attention_for_them_takes_less_time_than_equal_shares() -> None:
    costs = costs_on(IDEAL)
    alone, equal, more = (
        simulate_ticks(planned(costs, number, speed), costs).seconds
        for number, speed in ((0, 1.0), (2, 1.0), (2, 2.0))
    )
    assert more < equal < alone


def test_they_keep_no_inputs() -> None:
    costs = costs_on(IDEAL)
    with pytest.raises(ValueError, match="dedicated servers keep no inputs"):
        simulate_ticks(planned(costs, 1), costs, backward="keep")
