"""Simulated prefills that drop far keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS
from distca.cost.steps import step_bytes
from distca.plan.span import Floats
from distca.schedule.serving.csps import Levels
from distca.schedule.serving.csps.pipeline import thinned
from distca.simulate import CLUSTERS
from distca.simulate.serving import InferenceCosts
from distca.simulate.serving.sparse import SparseLatency
from distca.simulate.serving.steps import SteppedCosts

TOKENS, RANKS, HEADS = 65_536, 4, 8


def latency(network_gb_per_s: float) -> SparseLatency:
    """Prompts on two nodes of two GPUs."""
    cluster = replace(CLUSTERS["dgx-a100"], gpus_per_node=2, network_gb_per_s=network_gb_per_s)
    costs = InferenceCosts(MODELS["llama-8b"], cluster)
    model = cluster.inference_cost(costs.shape)
    return SparseLatency(costs, model, Levels(costs.links, RANKS), TOKENS)


def kept(*ratios: tuple[float, float]) -> Floats:
    """Ratios of two far levels, alike in all heads."""
    return np.repeat(np.array(ratios)[:, None], HEADS, axis=1)


@pytest.mark.parametrize("network_gb_per_s", [0.5, 25.0])
def test_a_layer_takes_less_the_less_is_kept(network_gb_per_s: float) -> None:
    found = latency(network_gb_per_s)
    seconds = found.layer_seconds(kept((1, 1), (0.8, 0.8), (0.8, 0.4), (0.1, 0.05)), (2,))
    assert (np.diff(seconds) < 0).all()
    assert found.other_seconds > 0
    # Heads that keep different shares take what their mean does, but for kernels' tiles.
    plan, ratios = found.plan((2,)), np.repeat([[1.0, 0.8, 0.4]], HEADS, axis=0)
    ratios[::2, 1:] -= 0.2
    ratios[1::2, 1:] += 0.2
    mixed = thinned(plan, found.levels, tuple(map(tuple, ratios.tolist())), ((1.0,) * 3,) * HEADS)
    assert found.plan_seconds(mixed) == pytest.approx(seconds[2], rel=0.02)


@pytest.mark.parametrize("network_gb_per_s", [0.5, 2.0, 25.0])
def test_communication_hides_behind_kernels(network_gb_per_s: float) -> None:
    """A layer takes between the longer of the two and their sum, less with some partitions; and all
    bytes that the plan keeps are charged."""
    found, seconds = latency(network_gb_per_s), {}
    costs = found.costs
    for partitions in (1, 4, 64):
        dense = found.plan((1, partitions))
        plan = thinned(dense, found.levels, ((1.0, 0.5, 0.25),) * HEADS, ((1.0,) * 3,) * HEADS)
        stepped = SteppedCosts(plan, costs.shape, found.cost_model, costs.links)
        computed = np.sum([each.kernel_seconds for each in stepped.steps], axis=0)
        moved = step_bytes(plan, costs.shape)
        busy = np.sum([costs.links.busy_seconds(each) for each in moved], axis=0)
        seconds[partitions] = found.plan_seconds(plan)
        assert max(computed.max(), busy.max()) < seconds[partitions]
        # Copies and merges come on top.
        assert seconds[partitions] < 1.2 * (computed.max() + busy.max()) or partitions == 64
        tasks = plan.plan.tasks
        away = plan.select(plan.plan.owners(tasks.kv_start).rank != tasks.server)
        assert away.kept is not None
        # Both pieces of a rank's queries share what it is sent.
        pairs = np.column_stack([away.plan.tasks.server, away.plan.tasks.kv_start])
        _, once = np.unique(pairs, axis=0, return_index=True)
        rows = int(away.kept.kv[once].sum())
        assert sum(each.total for each in moved) == rows * costs.shape.kv_head_bytes
    assert seconds[64] > seconds[4]
    if network_gb_per_s < 25:
        assert seconds[4] < seconds[1]
