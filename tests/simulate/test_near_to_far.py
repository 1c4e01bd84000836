"""Prefills from near to far: what they keep, how long they take, and where tokens are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.kernel_time import AnalyticCost
from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Plan
from distca.schedule.serving import nobody_holds
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.pipeline import NearToFar, shard_near, thinned
from distca.simulate.serving import InferenceCosts, simulate_step
from support.simulated import IDEAL

SHAPE = AttentionShape(8, 2, 64)
MODEL = ModelSize(4, 512, 8, 2, 64, 1024, 1000)


def planned(tokens: int, levels: Levels, drop: float, partitions: tuple[int, ...] = (2,)) -> Plan:
    """The plan of a prompt's second layer."""
    sparsity = Sparsity.of_drop_ratio(drop, 4, SHAPE.kv_heads)
    strategy = NearToFar(levels, sparsity, (None,) * 4, partitions)
    new = shard_near(np.array([0]), np.array([tokens]), levels.ranks)
    dense = strategy.plan(nobody_holds(levels.ranks), new, Mask())
    found = strategy.sparse_plans(dense).get(1, dense)
    found.validate()
    return found


@pytest.mark.parametrize("partitions", [(1,), (2, 3)])
def test_a_fifth_of_the_nodes_keys_is_dropped(partitions: tuple[int, ...]) -> None:
    """Keys alone, three levels, 16 ranks, 8 to a server."""
    levels = Levels(Links(8), 16)
    dense, sparse = (planned(16 * 960, levels, drop, partitions) for drop in (0.0, 0.2))
    pairs = sparse.tasks.kept_pairs(sparse.mask).mean(axis=1).sum() / dense.loads().sum()
    whole, kept = (plan_bytes(plan, SHAPE).forward() for plan in (dense, sparse))
    between = [levels.links.between_nodes(each) for each in (kept, whole)]
    assert pairs == pytest.approx(0.6125, abs=2e-3)
    assert kept.total / whole.total == pytest.approx(0.5867, abs=2e-3)
    assert between[0] / between[1] == pytest.approx(0.4, abs=2e-3)
    # All ratios 1 is another way to write that nothing is dropped.
    all_kept = ((1.0, 1.0, 1.0),) * 2
    full = thinned(dense, levels, all_kept, all_kept)
    assert plan_bytes(full, SHAPE).forward().total == whole.total


def seconds(plan: Plan, gb_per_s: float, flops: float, launch: float = 0.0) -> float:
    """Simulated seconds of a layer's attention, other layers being free."""
    machine = replace(IDEAL, network_gb_per_s=gb_per_s, gpus_per_node=1, launch_seconds=launch)
    free = replace(machine, peak_tflops=1e9)
    costs = InferenceCosts(replace(MODEL, layers=1), free)
    return simulate_step([plan], costs, AnalyticCost.of_shape(SHAPE, flops)).seconds


@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_partitions_hide_what_travels_until_their_overhead_shows(drop: float) -> None:
    levels, launch, found = Levels(Links(2), 4), 2e-5, []
    for parts in (1, 2, 4, 8, 16, 32):
        plan = planned(16_384, levels, drop, (parts,))
        both, computed, travelled = (
            seconds(plan, *rates) for rates in ((0.5, 1e13), (1e9, 1e13), (0.5, 1e30))
        )
        assert max(computed, travelled) <= both * (1 + 1e-9)
        assert both <= (computed + travelled) * (1 + 1e-9)
        found.append(seconds(plan, 0.5, 1e13, launch))
        if parts == 1:
            # There is something to hide.
            assert both > 1.2 * max(computed, travelled)
    best = int(np.argmin(found))
    assert 0 < best < len(found) - 1
    assert found[: best + 1] == sorted(found[: best + 1], reverse=True)
    assert found[best:] == sorted(found[best:])


def test_short_prefills_fill_the_last_partition() -> None:
    starts, ends = np.zeros(4, dtype=np.int64), np.array([50, 1000, 0, 78])
    placed = shard_near(starts, ends, 4)
    assert placed.tokens_per_rank().tolist() == [282] * 4
    whole = {int(n): placed.rank[placed.document == n].tolist() for n in (0, 1, 3)}
    assert whole == {0: [3], 1: [0, 1, 2, 3], 3: [3]}
    assert shard_near(starts, starts + np.array([0, 3, 0, 0]), 4).tokens_per_rank().tolist() == [
        1,
        1,
        1,
        0,
    ]


def test_numbers_of_partitions_are_checked() -> None:
    dense = Sparsity.nothing_dropped(4, 2)
    for wrong in ((), (2, 0)):
        with pytest.raises(ValueError, match="micro-partitions: give at least 1"):
            NearToFar(Levels(Links(2), 4), dense, (None,) * 4, wrong)
