"""Models with experts in the simulator: sizes, seconds, memory, and who shares them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS, Experts, ModelSize
from distca.cost.training_memory import GRADIENT_BYTES, OPTIMIZER_BYTES
from distca.simulate import CLUSTERS, Candidate, ModelCosts, Workload, divisions, simulate
from distca.simulate.flags import training_flags
from distca.simulate.outcome import Outcome
from distca.simulate.serving.costs import InferenceCosts
from support.simulated import MODEL

CLUSTER = CLUSTERS["dgx-h200"]
SPARSE = replace(MODEL, ffn_hidden_size=0, experts=Experts(8, 2, 512))
"""As many parameters for a token as `MODEL`, of four times as many."""


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("mixtral-8x7b", 46.7, 12.9), ("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235, 22)],
)
def test_sizes_are_the_published_ones(name: str, billions: float, active: float) -> None:
    model = MODELS[name]
    ends = 2 * model.vocabulary_parameters
    total = model.layers * model.total_layer_parameters + ends
    assert total / 1e9 == pytest.approx(billions, rel=0.005)
    used = model.layers * model.layer_parameters + ends
    assert used / 1e9 == pytest.approx(active, rel=0.02)


def test_experts_compute_as_a_dense_layer_of_their_width() -> None:
    dense, sparse = ModelCosts(MODEL, CLUSTER), ModelCosts(SPARSE, CLUSTER)
    assert sparse.post_seconds() == pytest.approx(dense.post_seconds())
    # Rows are kept when they come to their experts, and when they leave.
    assert sparse.activation_bytes() - dense.activation_bytes() == 2 * 2 * 512 * 2
    # The hidden rows of tensor-parallel ranks are not gathered for experts.
    parts = [ModelCosts(model, CLUSTER, 2).post_seconds()[0] for model in (MODEL, SPARSE)]
    gathered = 2 * 0.5 * 512 * 2 / CLUSTER.node_bytes_per_second
    assert parts[0] - parts[1] == pytest.approx(gathered)


@pytest.mark.parametrize(("size", "far"), [(4, 0), (16, 8)])
def test_rows_travel_to_their_experts_and_back(size: int, far: int) -> None:
    apart = ModelCosts(replace(SPARSE, experts=Experts(16, 2, 512)), CLUSTER, expert_parallel=size)
    alone = replace(apart, expert_parallel=1)
    row = 2 * 2 * 512 * 2 / size
    near = (min(size, 8) - 1) * row / CLUSTER.node_bytes_per_second
    expected = max(near, far * row / CLUSTER.network_bytes_per_second)
    more = np.array(apart.post_seconds()) - alone.post_seconds()
    assert more == pytest.approx([expected, expected])
    again = replace(apart, recompute="mlp").post_seconds()[1] - apart.post_seconds()[1]
    linear = 2 * SPARSE.mlp_parameters / (CLUSTER.peak_tflops * 1e12 * CLUSTER.linear_mfu)
    assert again == pytest.approx(linear + expected)


def test_each_gpu_has_its_experts_alone() -> None:
    costs = ModelCosts(SPARSE, CLUSTER, tensor_parallel=2, expert_parallel=4)
    # 8 servers of 2 GPUs in a stage: four GPUs have the same experts, two of them in a node.
    layers = SPARSE.layers // 2
    dense = (layers * SPARSE.dense_layer_parameters + SPARSE.vocabulary_parameters) / 2
    experts = layers * 3 * 512 * 512 * 8 / 4
    each = 2 + GRADIENT_BYTES
    expected = dense * (each + OPTIMIZER_BYTES / 8) + experts * (each + OPTIMIZER_BYTES / 4)
    assert costs.state_bytes(0, 2, 8) == pytest.approx(expected)
    without = replace(costs, model=replace(SPARSE, experts=None))

    def more(stages: int, replicas: int) -> float:
        whole = costs.gradient_seconds(0, stages, replicas)
        return whole - without.gradient_seconds(0, stages, replicas)

    assert more(2, 8) == pytest.approx(
        experts * each * 3 / 4 / (2 * CLUSTER.network_bytes_per_second)
    )
    # Two GPUs of a node have the same.
    assert more(2, 4) == pytest.approx(experts * each / 2 / CLUSTER.node_bytes_per_second)


def test_experts_divide() -> None:
    def workload(model: ModelSize, size: int) -> Workload:
        return Workload(model, CLUSTER, 16, 8192, 8, expert_parallel=size)

    with pytest.raises(ValueError, match="3 GPUs cannot share 8 experts evenly"):
        workload(SPARSE, 3)
    with pytest.raises(ValueError, match="2 GPUs cannot share experts: there are none"):
        workload(MODEL, 2)
    # A stage has as many GPUs as share its experts.
    found = divisions("tiles", workload(SPARSE, 8), (1, 2), (1, 2, 4))
    assert {candidate.stages for candidate in found} == {1, 2}


def test_a_job_with_experts_is_simulated() -> None:
    batch = [np.array([6000, 2192]), np.array([1024] * 8)] * 4
    candidate = Candidate("tiles", 1, 1, 8, 1, 1)
    seconds, memory = [], []
    for model, size in ((MODEL, 1), (SPARSE, 1), (SPARSE, 8)):
        workload = Workload(model, CLUSTER, 8, 8192, 8, 0.1, "mlp", size)
        outcome = simulate(candidate, workload, batch)
        assert outcome.fits
        seconds.append(outcome.seconds)
        memory.append(outcome.memory_bytes.max())
    # Rows travel where experts are shared out, and each GPU has fewer weights.
    assert seconds[0] <= seconds[1] < seconds[2]
    assert memory[0] < memory[2] < memory[1]
    flags = training_flags(candidate, workload)
    assert "--expert-model-parallel-size 8" in flags
    assert "--recompute-granularity selective --recompute-modules moe" in flags


def test_few_tokens_read_the_experts_that_they_choose() -> None:
    costs = InferenceCosts(replace(SPARSE, experts=Experts(8, 2, 512)), CLUSTER)
    one, three, many = costs.post_seconds(np.array([1, 3, 5]))
    expert = 3 * 512 * 512 * 2 / CLUSTER.copied_bytes_per_second
    assert three - one == pytest.approx(4 * expert)
    assert many - three == pytest.approx(2 * expert)
    assert costs.state_bytes() - InferenceCosts(MODEL, CLUSTER).state_bytes() == pytest.approx(
        SPARSE.layers * (8 - 2) * 3 * 512 * 512 * 2
    )


@pytest.mark.parametrize("system", ["plain", "per-document-cp", "tiles"])
def test_replicas_that_share_experts_wait_for_the_slowest(system: str) -> None:
    """In each micro-batch; without, long and short ones of a replica add up to the same."""
    long, short = np.array([8192]), np.array([512] * 16)
    batch = [long, short, short, long]
    size = 2 if system == "per-document-cp" else 1
    data = 4 // size
    candidate = Candidate(system, 1, 1, 2 if system == "plain" else data, size, 2)
    if system == "tiles":
        candidate = replace(candidate, ping_pong=False, pool_size=1)
    gpus = candidate.data * candidate.context

    def outcome(experts: int) -> Outcome:
        workload = Workload(SPARSE, CLUSTER, gpus, 8192, 4, expert_parallel=experts)
        return simulate(candidate, workload, batch)

    alone, shared = outcome(1), outcome(gpus)
    waited = [float((each.exposed - each.gathering).sum()) for each in (alone, shared)]
    assert waited[1] > waited[0]
    costs = [ModelCosts(SPARSE, CLUSTER, expert_parallel=each).post_seconds() for each in (1, gpus)]
    # All-to-alls take the same time in all replicas.
    more = SPARSE.layers * 2 * 8192 / size * float(np.sum(costs[1]) - np.sum(costs[0]))
    assert shared.seconds > 1.01 * (alone.seconds + more)
