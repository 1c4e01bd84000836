"""Steps of inference on described clusters: time by hand, bytes of the plans, and the choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca.cost.link import Links
from distca.cost.model_sizes import MODELS, ModelSize
from distca.cost.steps import stepped_bytes
from distca.cost.tiled import TiledCost
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, Plan, SteppedPlan, Tasks, validate_stepped_plan
from distca.schedule.serving import (
    STRATEGIES,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.schedule.serving.csps.layouts import LAYOUTS, Layout
from distca.simulate import CLUSTERS, Charges, Outcome, save_trace
from distca.simulate.serving import (
    InferenceCosts,
    SimulatedSelector,
    SteppedCosts,
    described_split,
    simulate_shared,
    simulate_step,
)
from support.simulated import IDEAL

MODEL = ModelSize(3, 512, 8, 2, 64, 1024, 1000)
SHAPE = AttentionShape(8, 2, 64)


def ring_of_two(new: int = 256) -> SteppedPlan:
    """Ranks 0 and 1 have a half of each of two documents; keys of the other half travel to rank 1,
    then, to rank 0."""
    half = new // 2
    zeros = np.zeros(2, dtype=np.int64)
    document, rank = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 0])
    start, end = np.tile([0, half], 2), np.tile([half, new], 2)
    local = [(d, s, e, s, e, r) for d, s, e, r in zip(document, start, end, rank, strict=True)]
    tasks = Tasks.from_rows([*local, (0, half, new, 0, half, 1), (1, half, new, 0, half, 0)])
    plan = Plan(zeros + new, Placement(document, start, end, rank, 2), tasks)
    return SteppedPlan(plan, np.array([0, 0, 0, 0, 1, 1]))


def seconds_of(
    plan: SteppedPlan, gb_per_s: float, **changes: float
) -> tuple[Outcome, float, float]:
    """A simulated step with one layer, seconds of a step's rows on a link, and of the layers."""
    machine = replace(IDEAL, network_gb_per_s=gb_per_s, gpus_per_node=1, **changes)  # type: ignore[arg-type]
    costs = InferenceCosts(replace(MODEL, layers=1), machine)
    found = simulate_step([plan], costs, TiledCost.of_shape(SHAPE, 1e12))
    own = plan.plan.own_tokens_per_rank()
    last = np.array([1, 1])
    linear = costs.pre_seconds(own) + costs.post_seconds(own) + costs.head_seconds(last)
    moved = stepped_bytes(plan, SHAPE)
    return found, float(moved.sent().max()) / (gb_per_s * 1e9), float(linear.max())


def test_a_step_s_rows_travel_behind_the_kernels_of_the_step_before() -> None:
    plan = ring_of_two()
    validate_stepped_plan(plan)
    cost = TiledCost.of_shape(SHAPE, 1e12)
    tile, square = np.array([128]), np.array([128 * 129 // 2, 128 * 128])
    diagonal, full = (float(cost.seconds(tile, tile, np.array([n]))[0]) for n in square)
    # Two tasks of each rank in step 0, one in step 1.
    for speed in (1e3, 1e-1):
        found, on_link, linear = seconds_of(plan, speed)
        exposed = max(on_link - 2 * diagonal, 0.0)
        assert found.seconds == pytest.approx(linear + 2 * diagonal + exposed + full, rel=1e-6)
        assert found.exposed.tolist() == pytest.approx([exposed] * 2, abs=1e-12)
    assert exposed > 10 * full
    # Rows of a single step are waited for before its kernels.
    direct = SteppedPlan.at_once(plan.plan)
    found, on_link, linear = seconds_of(direct, 1e-1)
    assert found.seconds == pytest.approx(linear + 2 * diagonal + on_link + full, rel=1e-6)
    # A slower link takes as much longer.
    slower = seconds_of(direct, 1e-1, charges=Charges(link_efficiency=0.5))[0]  # type: ignore[arg-type]
    assert slower.seconds - found.seconds == pytest.approx(on_link, rel=1e-6)


def turn(ranks: int, cached: int, new: int) -> tuple[Placement, Placement]:
    """Who holds the cached tokens of two sequences, one ten times as long, and their new tokens."""
    ends = np.array([cached, cached // 10])
    held = shard_evenly(np.zeros(2, dtype=np.int64), ends, ranks) if cached else nobody_holds(ranks)
    return held, shard_evenly(ends, ends + new, ranks)


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("strategy", ["pass-kv", "pass-q"])
def test_bytes_are_the_plans(strategy, in_steps: bool, tmp_path: Path) -> None:
    plan, windowed = (
        step_plan(*turn(3, 2000, 50), strategy, mask, in_steps=in_steps)
        for mask in (Mask(), Mask(100))
    )
    costs = InferenceCosts(MODEL, IDEAL)
    found = simulate_step([plan, windowed, plan], costs, recording=True)
    moved = [stepped_bytes(each, SHAPE) for each in (plan, plan, windowed)]
    for phase in ("dispatch", "combine"):
        expected = np.sum([each.messages[phase].sent() for each in moved], axis=0)
        assert found.bytes_sent[phase].tolist() == expected.tolist()
    assert found.tokens == 100
    assert found.gpus == 3
    # Weights, and keys and values of all layers; buffers beside them.
    rows = plan.plan.placement.tokens_per_rank() * 3 * SHAPE.kv_row_bytes
    assert np.all(found.memory_bytes > costs.state_bytes() + rows)
    save_trace(tmp_path / "trace.json", found)


def test_keys_of_a_query_are_one_kernel_sequence_however_they_are_cut() -> None:
    """A rank's stripes of a sequence cost what a whole piece of as many keys does."""
    start = np.array([4096])
    new = shard_in_stripes(start, start + 1, start * 0, 16, 2)
    cost = TiledCost.of_shape(SHAPE, 1e12)
    for stripe in (16, 2048):
        held = shard_in_stripes(start * 0, start, start * 0, stripe, 2)
        plan = step_plan(held, new, "pass-q", Mask())
        (step,) = SteppedCosts(plan, SHAPE, cost, Links()).steps
        keys = np.array([2048 + 1, 2048])
        expected = cost.seconds(keys * 0 + 1, keys, keys)
        assert step.kernel_seconds.tolist() == pytest.approx(expected.tolist())
        assert step.kernel_calls.tolist() == [1, 1]


def test_results_are_merged_as_they_come() -> None:
    """On servers each kernel sequence's, at owners those that return; queries that arrive move."""
    start = np.array([3000])
    held = shard_evenly(start * 0, start, 3)
    new = shard_evenly(start, start + 60, 3)
    plan = step_plan(held, new, "pass-q", Mask(), in_steps=True)
    costs = SteppedCosts(plan, SHAPE, TiledCost.of_shape(SHAPE, 1e12), Links())
    # Sums in float32 are read and written, and the result is read.
    row = 2 * (8 * 64 * 4 + 32) + SHAPE.q_row_bytes + SHAPE.lse_row_bytes
    # 20 rows of each rank: with cached keys and with those of their own piece; then on two others.
    assert costs.steps[0].merged.tolist() == [2 * 20 * row] * 3
    for step in costs.steps[1:]:
        assert step.merged.tolist() == [20 * row] * 3
        assert step.merged_returned.tolist() == [20 * row] * 3
        assert step.queries.tolist() == [20 * SHAPE.q_row_bytes] * 3
    assert not costs.steps[0].merged_returned.any()
    assert not costs.steps[0].queries.any()


def test_few_tokens_wait_for_weights_and_many_for_products() -> None:
    costs = InferenceCosts(MODEL, replace(IDEAL, copy_gb_per_s=1.0))
    few, more, many = (costs.post_seconds(np.array([n]))[0] for n in (1, 8, 10**6))
    assert few == more == pytest.approx(2 * MODEL.post_parameters / 1e9)
    rate = IDEAL.peak_tflops * IDEAL.linear_mfu * 1e12
    assert many == pytest.approx(2 * MODEL.post_parameters * 1e6 / rate)
    assert costs.post_seconds(np.array([0]))[0] == 0
    # Eight bits: half of the MLP's weights, at twice the rate.
    eight = replace(costs, mlp_dtype_bytes=1)
    mlp = 3 * 512 * 1024
    assert few - eight.post_seconds(np.array([1]))[0] == pytest.approx(mlp / 1e9)
    assert many - eight.post_seconds(np.array([10**6]))[0] == pytest.approx(mlp * 1e6 / rate)


def test_tensor_parallelism_may_span_nodes() -> None:
    """Beyond a node its collectives go through the network, and key-value heads are copied."""
    cluster = replace(IDEAL, node_gb_per_s=450.0, network_gb_per_s=50.0)
    tokens = np.array([10**6])
    with pytest.raises(ValueError, match="does not divide 8 heads"):
        InferenceCosts(MODEL, cluster, 16)
    model = replace(MODEL, heads=16)
    inside, outside = (InferenceCosts(model, cluster, size) for size in (8, 16))
    assert (outside.shape.heads, outside.shape.kv_heads) == (1, 1)
    row = 3 * 10**6 * 512 * 2 / 1e9
    for costs, size, speed in ((inside, 8, 450), (outside, 16, 400)):
        rate = cluster.peak_tflops * cluster.linear_mfu * 1e12 * size
        products = 2 * model.post_parameters * 10**6 / rate
        moved = row * (size - 1) / size / speed
        assert costs.post_seconds(tokens)[0] == pytest.approx(products + moved, rel=1e-6)
    with pytest.raises(ValueError, match="divisor or a multiple of the 8 GPUs"):
        InferenceCosts(model, cluster, 12)


def test_the_selector_takes_the_plan_of_fewer_seconds() -> None:
    machine = replace(IDEAL, gpus_per_node=1)
    chosen = []
    for cached, new in ((0, 4000), (40000, 40), (40000, 4000)):
        for speed in (0.1, 1000.0):
            selector = SimulatedSelector(
                SHAPE, machine, Links(1, 450.0, speed), TiledCost.of_shape(SHAPE, 1e12)
            )
            held = turn(4, cached, new)
            plans = {
                strategy: step_plan(*held, strategy, Mask(), in_steps=True)
                for strategy in STRATEGIES
            }
            found = selector.choose(*held, plans.__getitem__)
            assert selector.seconds(plans[found]) == min(map(selector.seconds, plans.values()))
            chosen.append(found)
    # A prompt passes keys, a short turn over a slow link queries.
    assert chosen[0] == "pass-kv"
    assert chosen[2] == "pass-q"
    assert set(chosen) == {"pass-kv", "pass-q"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_rows_are_charged_by_their_bytes(layout: Layout) -> None:
    """On two nodes; slower links take longer, and what is chosen by bytes sends less."""
    model, cluster = MODELS["llama-8b"], replace(CLUSTERS["dgx-h100"], gpus_per_node=4)
    new = shard_evenly(np.array([0]), np.array([20_001]), 1)
    plan, found = step_plan(nobody_holds(1), new, "pass-kv", Mask(), in_steps=True), []
    for speed in (50.0, 5.0):
        costs = InferenceCosts(model, replace(cluster, network_gb_per_s=speed), 8)
        split = described_split(costs, layout)
        shared = split.share(20_001)
        assert shared is not None
        outcome = simulate_shared(split, shared, [plan] * model.layers, costs)
        moved = {name: int(sent.sum()) for name, sent in outcome.bytes_sent.items()}
        assert sum(moved.values()) == shared.bytes_moved
        assert outcome.computed.max() + outcome.exposed.max() >= outcome.seconds
        found.append(outcome.seconds)
    assert found[1] > 1.5 * found[0]
