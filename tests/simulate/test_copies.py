"""Simulated copies of rows against those of the runtime, and the time that they take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.volume import PHASES, AttentionShape, plan_bytes
from distca.runtime.exchange import Combination, Exchange, build_exchange
from distca.schedule import ExecutionOptions, ScheduleConfig
from distca.simulate import (
    Ablation,
    plan_global_batch,
    simulate_ticks,
)
from distca.simulate.copies import copy_traffic
from support.batches import long_tailed_lengths
from support.simulated import DIRECTIONS, IDEAL, costs_on, planned


def copied_by_the_runtime(
    exchange: Exchange, shape: AttentionShape, grouped: bool
) -> tuple[int, int]:
    """Bytes that its steps read and write beside kernels, forward and backward, tensor by tensor.

    One copy of what is sent, and one of what arrives, are counted elsewhere.
    """
    q_row, kv_row, lse = shape.q_row_bytes, shape.kv_row_bytes, shape.lse_row_bytes
    wide_q, wide_kv = 2 * q_row, 2 * kv_row
    q, kv, calls = exchange.q, exchange.kv, exchange.calls
    forward = 2 * (len(q.send) * q_row + len(kv.send) * kv_row)
    # A head group's part of a tensor is not contiguous, but its own LSE is.
    forward += 2 * q.local * q_row if q.received or grouped else 0
    forward += 2 * kv.local * kv_row if kv.received or grouped else 0
    for call in calls:
        rows, keys = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_kv[-1])
        forward += 2 * rows * q_row if call.q_rows is not None else 0
        forward += 2 * keys * kv_row if call.kv_rows is not None else 0
    computed, finished, out = exchange.computed, exchange.finished, q_row + lse

    def merged(combination: Combination) -> int:
        if combination.merges is None:
            return 0
        members, shared = len(combination.merges.members), len(combination.merges.begins)
        of_members, of_shared = 3 * q_row + 2 * wide_q + 13 * lse, q_row + 2 * wide_q + 7 * lse
        return members * of_members + shared * of_shared

    if computed is not None and calls:
        together = len(calls) > 1 or computed.merges is not None
        forward += 2 * computed.parts * out if together else 0
        forward += merged(computed) + 2 * q.served * out
    if computed is None and finished is not None:
        forward += 2 * q.served * out
    if finished is not None:
        forward += merged(finished)
    if q.received or computed is not None or finished is not None:
        forward += 2 * q.local * out
    # Outputs and gradients of all groups are concatenated.
    forward += 2 * q.local * q_row if grouped else 0
    inputs = 3 * q_row + lse
    backward = 2 * (len(q.send) * inputs + len(kv.send) * kv_row)
    backward += 2 * q.local * 3 * q_row if q.received or grouped else 0
    backward += 2 * q.local * lse if q.received else 0
    backward += 2 * kv.local * kv_row if kv.received or grouped else 0
    backward += 2 * (q.local * q_row + kv.local * kv_row) if grouped else 0
    backward += q.served * wide_q + kv.served * wide_kv
    for call in calls:
        rows, keys = int(call.cu_seqlens_q[-1]), int(call.cu_seqlens_kv[-1])
        for index, number, row, inputs_row in (
            (call.q_rows, rows, q_row, inputs),
            (call.kv_rows, keys, kv_row, kv_row),
        ):
            backward += number * (row + 2 * 2 * row)
            if index is not None:
                backward += number * (2 * inputs_row + 2 * 2 * row)
    for rows_of, row in ((q, q_row), (kv, kv_row)):
        backward += rows_of.received * (2 * row + row)
        sums, returning = rows_of.sums, len(rows_of.sums.rows)
        backward += rows_of.sent * (row + 2 * row) + returning * 3 * 2 * row
        backward += (rows_of.sent + returning) * 2 * row if sums.parts is not None else 0
        backward += rows_of.local * (2 * row + row)
    return forward, backward


@pytest.mark.parametrize("scheduler", ["packed", "per-document-cp", "greedy", "tiles"])
@pytest.mark.parametrize(("free_placement", "head_groups"), [(True, 1), (False, 1), (True, 2)])
def test_copies_are_those_of_the_runtime(
    scheduler: str, free_placement: bool, head_groups: int
) -> None:
    shape, grouped = AttentionShape(8, 2, 64, 2).head_group(head_groups), head_groups > 1
    options = ExecutionOptions(scheduler, ping_pong=False, free_placement=free_placement)
    merged = 0
    for seed in range(3):
        lengths = long_tailed_lengths(seed, 4 * 2048, 500, 8192)
        config = ScheduleConfig(shape=shape)
        (plan,) = plan_global_batch([lengths], 1, 4, config, options).ticks[0].plans
        forward, backward = (
            copy_traffic(plan, shape, direction, grouped) for direction in DIRECTIONS
        )
        exchanges = [build_exchange(plan, rank) for rank in range(4)]
        merged += sum(
            len(combination.merges.members)
            for one in exchanges
            if (combination := one.finished) is not None and combination.merges is not None
        )
        expected = [copied_by_the_runtime(exchange, shape, grouped) for exchange in exchanges]
        assert forward.tolist() == [each[0] for each in expected]
        assert backward.tolist() == [each[1] for each in expected]
    # Of some rows several servers compute a part.
    assert merged or scheduler != "tiles" or free_placement


@pytest.mark.parametrize(
    ("ablation", "head_groups"), [("none", 1), ("none", 2), ("single-stream", 1), ("signal", 1)]
)
def test_copies_take_the_time_of_memory(ablation: Ablation, head_groups: int) -> None:
    plan = planned([[8192, 8192, 100, 28]], 1, 2, ExecutionOptions("tiles"))
    slow = replace(IDEAL, copy_gb_per_s=1.0)
    took = [
        simulate_ticks(plan, costs_on(at), ablation=ablation, head_groups=head_groups).computed
        for at in (slow, IDEAL)
    ]
    costs = costs_on(slow)
    group, grouped = costs.shape.head_group(head_groups), head_groups > 1
    expected = np.zeros(2)
    for tick, plans in plan.ticks:
        phases = PHASES[:2] if tick.direction == "forward" else PHASES[2:]
        for each in plans:
            moved = plan_bytes(each, costs.shape).phases
            once = sum(moved[p].sum(axis=0) + moved[p].sum(axis=1) for p in phases)
            # Signals are packed and unpacked as their messages are.
            expected += 2 * once + head_groups * copy_traffic(each, group, tick.direction, grouped)
    assert took[0] - took[1] == pytest.approx(4 * expected / 1e9)
