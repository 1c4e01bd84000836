"""Memory of simulated ranks: activations, logits and the runtime's own buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distca.cost.kernel_memory import kernel_memory
from distca.cost.memory import HEADROOM, CoreAttentionMemory, plan_memory
from distca.cost.model_sizes import MODELS
from distca.cost.volume import BACKWARD_INPUTS, plan_bytes
from distca.runtime.buffers import Buffers
from distca.schedule import ExecutionOptions, ScheduleConfig
from distca.simulate import (
    CLUSTERS,
    BaselineLayout,
    ModelCosts,
    plan_global_batch,
    simulate_baseline,
    simulate_ticks,
)
from support.simulated import IDEAL, costs_on, planned


class SilentTransport:
    """Has no buffers of its own, and moves nothing."""

    rank = 1

    def reserve(self, sizes: object) -> None: ...


def test_memory_and_running_out_of_it() -> None:
    costs = ModelCosts(MODELS["llama-8b"], CLUSTERS["dgx-h200"], tensor_parallel=8)
    lengths = np.full(8, 131_072)
    alone = simulate_baseline("plain", lengths, BaselineLayout(1, 8, 1, 1), costs)
    # 32 layers of 139 kilobytes a token on 8 GPUs, as the paper's authors could run.
    assert 70e9 < 131_072 * 32 * costs.activation_bytes() < 80e9
    assert alone.fits
    # Two sequences at once on each don't fit; as two micro-batches they do.
    twice = np.full(16, 131_072)
    assert not simulate_baseline("plain", twice, BaselineLayout(1, 8, 1, 1), costs).fits
    accumulated = simulate_baseline("plain", twice, BaselineLayout(1, 8, 1, 2), costs)
    assert accumulated.fits
    assert accumulated.memory_bytes.max() == pytest.approx(alone.memory_bytes.max())
    # Gathered keys and values of the other ranks are kept (paper, Figure 3b).
    gathered = simulate_baseline("per-document-cp", lengths, BaselineLayout(1, 1, 8, 1), costs)
    more = 7 * 131_072 * 32 * costs.shape.kv_row_bytes
    assert gathered.memory_bytes.max() - alone.memory_bytes.max() == pytest.approx(more)
    # Ticks keep 2 P - 1 micro-batches in flight; a bound keeps fewer.
    config = ScheduleConfig(shape=costs.shape)
    windows = [np.full(2, 131_072)] * 8
    free, bound = (
        simulate_ticks(
            plan_global_batch(windows, 2, 4, config, ExecutionOptions(max_in_flight=most)), costs
        )
        for most in (None, 1)
    )
    each = 65_536 * 16 * costs.activation_bytes()
    fewer = free.memory_bytes[:4] - bound.memory_bytes[:4]
    assert fewer.tolist() == pytest.approx([2 * each] * 4, rel=0.02)
    assert bound.seconds > free.seconds


def test_logits_are_kept_until_their_backward_pass() -> None:
    windows = [[1024]] * 32
    # With a bound on what is in flight the last stage runs two micro-batches before the first's
    # backward pass (of 8 stages that keep at most 8); otherwise one.
    for bound, in_flight in ((8, 2), (None, 1)):
        plan = planned(
            windows, 8, 1, ExecutionOptions("packed", ping_pong=False, max_in_flight=bound)
        )
        assert plan.schedule.most_in_flight[-1] == in_flight
        found = []
        for vocabulary in (100_000, 200_000):
            costs = costs_on(IDEAL, layers=8, vocab_size=vocabulary)
            memory = simulate_ticks(plan, costs).memory_bytes
            found.append(memory - [costs.state_bytes(stage, 8, 1) for stage in range(8)])
        # A float32 number for each that waits, and 16 bits more for the one that runs.
        more = 1024 * 100_000 * (4 * in_flight + 2)
        assert found[1] - found[0] == pytest.approx([0.0] * 7 + [more])


def test_servers_keep_what_they_receive() -> None:
    """Kept inputs are not sent again, and stay until the backward pass, in every layer."""
    costs, plan = costs_on(IDEAL), planned([[16384, 8192, 8192]], 1, 2, ExecutionOptions("tiles"))
    found = []
    for inputs in BACKWARD_INPUTS:
        outcome = simulate_ticks(plan, costs, backward=inputs)
        room, sent = CoreAttentionMemory(), 0
        for each in plan.ticks[0].plans:
            room = room.union(plan_memory(each, costs.shape, inputs))
            sent = sent + plan_bytes(each, costs.shape, inputs).phases["dispatch_backward"].sum(1)
        moved = 4 * sent
        assert outcome.bytes_sent["dispatch_backward"].tolist() == moved.tolist()
        reserved = room.with_headroom(HEADROOM).total(2)
        found.append(outcome.memory_bytes - reserved)
    received = sum(
        plan_bytes(each, costs.shape).phases["dispatch"].sum(axis=0) for each in plan.ticks[0].plans
    )
    assert received.any()
    assert (found[1] - found[0]).tolist() == pytest.approx((4 * received).tolist())


def test_buffers_are_counted_as_the_runtime_reserves_them() -> None:
    costs = costs_on(IDEAL)
    plan = planned([[16384, 8192, 8192]], 1, 2, ExecutionOptions("tiles", ping_pong=False))
    (made,) = plan.ticks[0].plans
    buffers = Buffers(torch.device("cpu"))
    buffers.reserve(plan_memory(made, costs.shape), SilentTransport())  # type: ignore[arg-type]
    reserved = buffers.room.total(1)
    own = made.own_tokens_per_rank()
    # Kernels take more than these few logits, which are gone when kernels run backward.
    kernels = kernel_memory(made, costs.shape)
    assert (kernels > own * costs.logit_bytes()).all()
    outcome = simulate_ticks(plan, costs)
    expected = own * 4 * costs.activation_bytes() + kernels
    expected = expected + costs.state_bytes(0, 1, 2) + reserved
    assert outcome.memory_bytes == pytest.approx(expected)
    assert reserved > 1.2 * plan_memory(made, costs.shape).total(1) > 0


def test_packed_megatron_has_kernels_too() -> None:
    costs = costs_on(IDEAL, layers=2, vocab_size=1)
    alone = simulate_baseline("plain", np.array([8192]), BaselineLayout(1, 1, 1, 1), costs)
    kept = 8192 * 2 * costs.activation_bytes() + costs.state_bytes(0, 1, 1)
    plan = planned([[8192]], 1, 1, ExecutionOptions("packed", ping_pong=False)).ticks[0].plans[0]
    (kernels,) = kernel_memory(plan, costs.shape)
    # A plan's kernel has 128 rows of padding.
    assert alone.memory_bytes[0] - kept == pytest.approx(kernels, rel=0.02)
