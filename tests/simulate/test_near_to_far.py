"""Prefills from near to far: what they keep, how long they take, and where tokens are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.kernel_time import AnalyticCost
from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.steps import stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, SteppedPlan, validate_stepped_plan
from distca.schedule.serving import nobody_holds
from distca.schedule.serving.csps import NODE_PARTS, Levels, NodeParts, Sparsity
from distca.schedule.serving.csps.pipeline import NearToFar, thinned
from distca.simulate.serving import InferenceCosts, simulate_step
from support.simulated import IDEAL

SHAPE = AttentionShape(8, 2, 64)
MODEL = ModelSize(4, 512, 8, 2, 64, 1024, 1000)


def planned(
    tokens: int, levels: Levels, drop: float, partitions: tuple[int, ...] = (2,)
) -> SteppedPlan:
    """The plan of a prompt's second layer."""
    sparsity = Sparsity.of_drop_ratio(drop, 4, SHAPE.kv_heads)
    strategy = NearToFar(levels, sparsity, (None,) * 4, partitions)
    new = strategy.shard(np.array([0]), np.array([tokens]))
    dense = strategy.plan(nobody_holds(levels.ranks), new, Mask())
    found = strategy.sparse_plans(dense).get(1, dense)
    validate_stepped_plan(found)
    return found


@pytest.mark.parametrize(
    ("parts", "partitions", "of_keys"),
    [("contiguous", (1,), 0.5867), ("contiguous", (2, 3), 0.5867), ("zigzag", (2, 3), 0.6270)],
)
def test_a_fifth_of_the_nodes_keys_is_dropped(
    parts: NodeParts, partitions: tuple[int, ...], of_keys: float
) -> None:
    """Keys alone, three levels, 16 ranks, 8 to a server. In zigzag more keys of the node travel."""
    levels = Levels(Links(8), 16, parts)
    dense, sparse = (planned(16 * 3840, levels, drop, partitions) for drop in (0.0, 0.2))
    pairs = sparse.kept_pairs().mean(axis=1).sum() / dense.plan.loads().sum()
    whole, kept = (stepped_bytes(plan, SHAPE) for plan in (dense, sparse))
    between = [levels.links.between_nodes(each) for each in (kept, whole)]
    assert pairs == pytest.approx(0.6125, abs=2e-3)
    assert kept.total / whole.total == pytest.approx(of_keys, abs=2e-3)
    assert between[0] / between[1] == pytest.approx(0.4, abs=2e-3)
    # All ratios 1 is another way to write that nothing is dropped.
    all_kept = ((1.0, 1.0, 1.0),) * 2
    full = thinned(dense, levels, all_kept, all_kept)
    assert stepped_bytes(full, SHAPE).total == whole.total


def seconds(plan: SteppedPlan, gb_per_s: float, flops: float, launch: float = 0.0) -> float:
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
    contiguous = Levels(Links(4), 4, "contiguous")
    placed = contiguous.shard(starts, ends)
    assert placed.tokens_per_rank().tolist() == [282] * 4
    whole = {int(n): placed.rank[placed.document == n].tolist() for n in (0, 1, 3)}
    assert whole == {0: [3], 1: [0, 1, 2, 3], 3: [3]}
    few = contiguous.shard(starts, starts + np.array([0, 3, 0, 0]))
    assert few.tokens_per_rank().tolist() == [1, 1, 1, 0]


def test_numbers_of_partitions_are_checked() -> None:
    dense = Sparsity.nothing_dropped(4, 2)
    for wrong in ((), (2, 0)):
        with pytest.raises(ValueError, match="micro-partitions: give at least 1"):
            NearToFar(Levels(Links(2), 4), dense, (None,) * 4, wrong)


def test_nodes_have_stretches_that_their_ranks_share_in_zigzag() -> None:
    """Whole nodes and half a one; a part of an odd number of tokens."""
    starts, ends = np.array([7, 0]), np.array([7 + 101, 9])
    placed = Levels(Links(4), 6).shard(starts, ends)
    assert placed.tokens_per_rank().tolist() == [19, 18, 18, 19, 18, 18]
    owners = np.zeros(110, dtype=np.int64)
    for document, start, end, rank in zip(
        placed.document, placed.start, placed.end, placed.rank, strict=True
    ):
        # The longer one comes first.
        at = slice(start - 7, end - 7) if document == 0 else slice(start + 101, end + 101)
        assert (owners[at] == 0).all()
        owners[at] = rank + 1
    changes = owners[np.flatnonzero(np.diff(owners, prepend=0))] - 1
    assert changes.tolist() == [0, 1, 2, 3, 2, 1, 0, 4, 5, 4]
    # Where nodes have one rank, parts are contiguous.
    alone = [Levels(Links(1), 6, parts).shard(starts, ends) for parts in NODE_PARTS]
    assert alone[0].start.tolist() == alone[1].start.tolist()
    assert Levels(Links(4), 6).owners(9, 0, 9) == [0, 1, 2, 3, 2, 0, 4, 5, 4]


@pytest.mark.parametrize(
    ("ranks", "parts", "dense", "sparse"),
    [
        (8, "contiguous", 15 / 8, 6.1 / 3.3),
        (8, "zigzag", 1.0, 1.0),
        (16, "contiguous", 31 / 16, 9.3 / 4.9),
        (16, "zigzag", 1.5, 6.5 / 4.9),
    ],
)
def test_zigzag_balances_the_ranks_of_a_node(
    ranks: int, parts: NodeParts, dense: float, sparse: float
) -> None:
    """Pairs of the busiest rank over the mean; the same ones in all, and as many bytes at most."""
    found = {}
    for each in NODE_PARTS:
        plans = [planned(ranks * 960, Levels(Links(8), ranks, each), drop) for drop in (0.0, 0.2)]
        found[each] = [pairs_of_servers(plan) for plan in plans]
        moved = stepped_bytes(plans[0], SHAPE)
        of_all = (ranks - 1) * 960 * SHAPE.kv_row_bytes
        assert moved.sent().max() == moved.received().max() == of_all
    for one, other in zip(*found.values(), strict=True):
        assert one.sum() == pytest.approx(other.sum(), rel=3e-3)
    over = [float(each.max() / each.mean()) for each in found[parts]]
    assert over == pytest.approx([dense, sparse], abs=0.01)


def pairs_of_servers(plan: SteppedPlan) -> np.ndarray:
    pairs = np.zeros(plan.plan.world_size)
    np.add.at(pairs, plan.plan.tasks.server, plan.kept_pairs().mean(axis=1))
    return pairs


@pytest.mark.parametrize(("per_node", "gb_per_s"), [(8, 0.5), (4, 0.5), (4, 50.0)])
def test_balanced_parts_take_less_time(per_node: int, gb_per_s: float) -> None:
    """Whatever hides what: work is shared better, and links are as busy."""
    seconds = []
    for parts in NODE_PARTS:
        plan = planned(16_384, Levels(Links(per_node), 8, parts), 0.2)
        machine = replace(IDEAL, network_gb_per_s=gb_per_s, gpus_per_node=per_node)
        costs = InferenceCosts(replace(MODEL, layers=1), replace(machine, peak_tflops=1e9))
        made = simulate_step([plan], costs, AnalyticCost.of_shape(SHAPE, 1e13))
        seconds.append(made.seconds)
    assert seconds[0] < 0.95 * seconds[1]
