"""Ranks that share heads in simulated iterations: bytes, time and memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.volume import SHARED_HEADS
from distca.simulate import Candidate, simulate
from distca.simulate.shared_heads import SharedHeadCosts
from distca.simulate.workload import incoming_of, planner_of
from support.simulated_jobs import JOB, JOBS, batch

ONE_EACH = Candidate("tiles", 1, 1, 8, 1, 2)
STAGES = Candidate("tiles", 1, 2, 4, 1, 4)


@pytest.mark.parametrize("base", [ONE_EACH, STAGES, replace(ONE_EACH, pool_size=4)], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_the_plans(base: Candidate, size: int) -> None:
    """Of exchanges between servers, and of the all-to-alls inside them."""
    candidate, sequences = replace(base, head_parallel=size), batch(0)
    planned = planner_of(candidate, JOB).plan(incoming_of(candidate, JOB, sequences))
    costs = JOB.costs_of(candidate)
    assert costs.shape == JOB.model.attention_shape(size)
    layers = JOB.model.layers // candidate.stages
    calls = [{"forward": layers, "backward": 0}], [{"forward": 0, "backward": layers}]
    expected: dict[str, np.ndarray] = {}
    for tick in planned.ticks:
        of_tick = tick.bytes_sent(
            calls[tick.tick.direction == "backward"], costs.shape, "resend", size
        )
        for phase, sent in of_tick.items():
            expected[phase] = expected.get(phase, 0) + sent
    outcome = simulate(candidate, JOB, sequences)
    assert outcome.gpus == JOB.gpus
    for phase, sent in expected.items():
        assert outcome.bytes_sent[phase].tolist() == sent.tolist(), phase
    assert all(expected[phase].all() for phase in SHARED_HEADS.values())


@pytest.mark.parametrize("job", ["charged", "slow links"])
def test_all_to_alls_take_time(job: str) -> None:
    """As long as their bytes, copies and launches; without them the iteration is shorter."""
    candidate = replace(ONE_EACH, head_parallel=4)
    # Nothing travels between nodes meanwhile that could hide behind them.
    cluster = replace(JOBS[job].cluster, network_gb_per_s=1e12, network_latency=0.0)
    workload = replace(JOBS[job], cluster=cluster)
    costs = workload.costs_of(candidate)
    found = SharedHeadCosts.of(costs)
    row = workload.model.attention_shape(1).token_bytes
    assert found.sent == row * 3 // 4
    copied = 4 * row / cluster.copied_bytes_per_second
    assert found.seconds == pytest.approx(found.sent / cluster.node_bytes_per_second + copied)
    assert found.launch_seconds == 2 * (cluster.launch_seconds + cluster.node_latency)
    seconds = simulate(candidate, workload, batch(0)).seconds
    free = replace(cluster, node_gb_per_s=1e12, node_latency=0.0)
    # Both servers fill a node, so plans send nothing inside nodes.
    without = simulate(candidate, replace(workload, cluster=free), batch(0)).seconds
    tokens = workload.sequences * workload.context / candidate.data
    of_links = 2 * workload.model.layers * tokens * found.sent / cluster.node_bytes_per_second
    assert seconds - without > 0.99 * of_links


def test_all_to_alls_between_nodes() -> None:
    """Ranks of several nodes send most rows through the network, and are one server."""
    model = replace(JOB.model, kv_heads=JOB.model.heads)
    cluster = replace(JOB.cluster, gpus_per_node=2, node_latency=1e-6)
    workload = replace(JOB, model=model, cluster=cluster)
    for size in (2, 4):
        candidate = replace(ONE_EACH, head_parallel=size)
        found = SharedHeadCosts.of(workload.costs_of(candidate))
        row = model.attention_shape(size).token_bytes
        copied = 4 * size * row / cluster.copied_bytes_per_second
        near = row / cluster.node_bytes_per_second
        far = (size - 2) * row / cluster.network_bytes_per_second
        assert found.seconds == pytest.approx(max(near, far) + copied)
        assert found.sent == (size - 1) * row
        outcome = simulate(candidate, workload, batch(0))
        assert outcome.gpus == workload.gpus
    assert cluster.links(4).ranks_per_node == cluster.links(2).ranks_per_node == 1
    with pytest.raises(ValueError, match="does not divide"):
        replace(cluster, gpus_per_node=4).links(6)


def test_servers_share_what_they_receive() -> None:
    """A key that goes to another node goes to one of its ranks for each head, not to all."""
    sent = {}
    for size in (1, 4):
        outcome = simulate(replace(ONE_EACH, head_parallel=size), JOB, batch(0))
        between = [phase for phase in outcome.bytes_sent if phase not in SHARED_HEADS.values()]
        each = sum(outcome.bytes_sent[phase].sum() for phase in between)
        sent[size] = float(each) * (size if size > 1 else 1)
    assert sent[4] < 0.7 * sent[1]


def test_no_latents_travel() -> None:
    assert JOB.costs_of(replace(ONE_EACH, head_parallel=2)).sends_latents is False
