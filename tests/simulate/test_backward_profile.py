"""Measured backward passes in the simulator."""

from __future__ import annotations

from dataclasses import replace

from distca.cost.profile import Profile
from distca.schedule import ExecutionOptions
from distca.simulate import simulate_ticks
from support.simulated import IDEAL, costs_on, mixed_batch, planned


def test_measured_backward_passes_replace_the_clusters_ratio() -> None:
    cluster = replace(IDEAL, backward_over_forward=3.0)
    costs = costs_on(cluster)
    lengths = (64, 1024, 16384)
    seconds = tuple(tuple(1e-9 * q * max(q, kv) for kv in lengths) for q in lengths)
    forward = Profile(lengths, seconds, seconds, costs.shape, {})

    def profile(times: float) -> Profile:
        backward = tuple(tuple(times * each for each in row) for row in seconds)
        return replace(forward, backward_full_seconds=backward, backward_diagonal_seconds=backward)

    windows = [each.tolist() for each in mixed_batch(2, 4 * 8192)]
    batch = planned(windows, 1, 4, ExecutionOptions())
    found = [
        simulate_ticks(batch, costs, cost_model=each).seconds
        for each in (forward, profile(3.0), profile(5.0))
    ]
    assert abs(found[1] / found[0] - 1) < 1e-9
    assert found[2] > 1.2 * found[0]
