"""Tiles of many prompts: every visible pair once, and less for the busiest rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.model_sizes import MODELS
from distca.cost.steps import step_bytes, stepped_bytes
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement, SteppedPlan, validate_stepped_plan
from distca.plan.span import Floats
from distca.schedule.base import ScheduleConfig, level_load, server_loads
from distca.schedule.serving import nobody_holds
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.simulate import CLUSTERS
from distca.simulate.serving import InferenceCosts
from distca.simulate.serving.iterations import simulate_iteration
from support.balanced import BLOCK, eager_tiles

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16)
TILES = eager_tiles(SHAPE)


def loads(stepped: SteppedPlan, strategy: BalancedTiles = TILES) -> Floats:
    plan, config = stepped.plan, strategy.config
    seconds = server_loads(plan.tasks, plan.mask, plan.world_size, config.cost_model)
    return seconds / config.speeds_of(plan.world_size)


def owned(*pieces: tuple[int, int, int, int], ranks: int) -> Placement:
    """Pieces `(document, start, end, rank)`."""
    table = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
    return Placement(*table, ranks)


@st.composite
def iterations(draw: st.DrawFn) -> tuple[list[ScheduledTokens], int]:
    """Chunks and decoded tokens of sequences that lie on one rank, on two, or anywhere."""
    ranks, feeds = draw(st.integers(1, 5)), []
    for number in range(draw(st.integers(1, 6))):
        start = draw(st.just(0) | st.integers(0, 150))
        count = draw(st.just(1) | st.integers(1, 150))
        blocks = -(-(start + count) // BLOCK)
        group = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2))
        if draw(st.integers(0, 3)) == 0:
            group = [*range(ranks)]
        # The first blocks, as those of a prefix, may all be elsewhere.
        change = draw(st.integers(0, blocks))
        mixed = draw(st.booleans())
        owners = [group[n % len(group)] if mixed else group[n >= change - 1] if len(group) == 2
                  else group[0] for n in range(blocks)]  # fmt: skip
        feeds.append(ScheduledTokens(number, start, count, np.array(owners, dtype=np.int64)))
    return feeds, ranks


@settings(max_examples=200)
@given(
    iterations(),
    st.none() | st.integers(0, 40),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([1, 2, 64]),
)
def test_any_iteration_has_a_valid_plan(
    drawn: tuple[list[ScheduledTokens], int], window: int | None, tolerance: float, of_node: int
) -> None:
    feeds, ranks = drawn
    masks = [Mask(), Mask(window)] if window is not None else [Mask()]
    strategy = eager_tiles(SHAPE, tolerance=tolerance, ranks_per_node=of_node)
    plan = plan_iteration(feeds, masks, BLOCK, ranks, strategy)
    if plan.prefill is None:
        return
    home = plan_iteration(feeds, masks, BLOCK, ranks, "pass-kv").prefill
    assert home is not None
    for mask in masks:
        stepped = plan.prefill.plans.by_mask[mask]
        validate_stepped_plan(stepped)
        whole = home.plans.by_mask[mask].plan
        # The same pairs, of the same queries at the same owners.
        assert stepped.plan.loads().sum() == whole.loads().sum()
        assert stepped.plan.own_tokens_per_rank().tolist() == whole.own_tokens_per_rank().tolist()
        # What is on its server already is computed while the rest travels.
        first, *later = step_bytes(stepped, SHAPE)
        assert stepped.steps <= (2 if of_node >= ranks else 3)
        assert not later or not first.total
        assert (
            stepped_bytes(stepped, SHAPE).total == plan_bytes(stepped.plan, SHAPE).forward().total
        )
        owners = {*np.flatnonzero(loads(stepped)).tolist()}
        assert owners <= {*plan.members}


def test_one_long_prompt_is_shared_by_all_ranks() -> None:
    new = owned((0, 0, 1600, 0), (1, 0, 40, 1), (2, 0, 36, 2), (3, 0, 1, 3), ranks=4)
    stepped = TILES.plan(nobody_holds(4), new, Mask())
    validate_stepped_plan(stepped)
    found = loads(stepped)
    assert found.max() < 1.03 * found.mean()
    # Linear layers stay where they are.
    assert stepped.plan.own_tokens_per_rank().tolist() == [1600, 40, 36, 1]


def test_tiles_stay_in_a_node_whose_load_is_that_of_others() -> None:
    """And leave it where nodes differ by much."""
    equal = owned((0, 0, 1600, 0), (1, 0, 4, 1), (2, 0, 4, 2), (3, 0, 1600, 3), ranks=4)
    other = owned((0, 0, 1600, 0), (1, 0, 4, 1), (2, 0, 4, 2), (3, 0, 400, 3), ranks=4)
    strategy = eager_tiles(SHAPE, ranks_per_node=2)
    for new, crosses in ((equal, False), (other, True)):
        stepped = strategy.plan(nobody_holds(4), new, Mask())
        validate_stepped_plan(stepped)
        moved = stepped_bytes(stepped, SHAPE)
        assert moved.total > 0
        assert (strategy.config.links.between_nodes(moved) > 0) == crosses
        found = loads(stepped)
        assert found.max() < (1.21 if crosses else 1.03) * found.mean()


def test_a_chunk_sees_the_keys_of_its_prefix_from_everywhere() -> None:
    """Whose queries are few: most that travels are keys, once to each rank."""
    held = owned((0, 0, 4000, 0), (1, 0, 80, 1), ranks=3)
    new = owned((0, 4000, 4100, 0), (1, 80, 180, 1), (2, 0, 100, 2), ranks=3)
    stepped = TILES.plan(held, new, Mask())
    validate_stepped_plan(stepped)
    found = loads(stepped)
    assert found.max() < 1.05 * found.mean()
    assert stepped_bytes(stepped, SHAPE).phases["dispatch"][0].sum() > 0


@pytest.mark.parametrize(
    ("lengths", "latency"),
    [
        # Equal prompts, and short ones. Moving a short one is charged more than it saves.
        ((128, 128, 128), 0.0),
        ((100, 3, 40), 1.0),
    ],
)
def test_nothing_moves_where_nothing_is_gained(lengths: tuple[int, ...], latency: float) -> None:
    ranks = len(lengths)
    new = owned(*((n, 0, length, n) for n, length in enumerate(lengths)), ranks=ranks)
    stepped = eager_tiles(SHAPE, latency=latency).plan(nobody_holds(ranks), new, Mask())
    assert stepped.steps == 1
    assert stepped_bytes(stepped, SHAPE).total == 0


def test_links_are_charged() -> None:
    """A link a thousand times slower than what kernels give back moves nothing, however long the
    prompt is."""
    new = owned((0, 0, 2000, 0), (1, 0, 4, 1), ranks=2)
    for flops, moves in ((1e6, True), (1e15, False)):
        strategy = eager_tiles(SHAPE, flops_per_second=flops)
        stepped = strategy.plan(nobody_holds(2), new, Mask())
        assert (stepped_bytes(stepped, SHAPE).total > 0) == moves
    home, moved = (
        eager_tiles(SHAPE, latency=latency).plan(nobody_holds(2), new, Mask())
        for latency in (1e6, 0.0)
    )
    assert TILES.seconds(moved, np.zeros(2)) < 0.6 * TILES.seconds(home, np.zeros(2))


def test_decoded_tokens_count_as_load() -> None:
    """A rank that attends to the keys of many answers computes less of others' prompts."""
    cost = TILES.config.cost_model
    assert cost is not None
    feeds = [
        ScheduledTokens(0, 0, 800, np.zeros(200, dtype=np.int64)),
        *(ScheduledTokens(n, 3999, 1, np.ones(1000, dtype=np.int64)) for n in range(1, 21)),
        ScheduledTokens(21, 0, 20, np.full(5, 2)),
    ]
    plan = plan_iteration(feeds, [Mask()], BLOCK, 3, TILES)
    assert plan.prefill is not None
    found = loads(plan.prefill.plans.by_mask[Mask()])
    decoded = float(cost.seconds(np.array([1]), np.array([4000]), np.array([4000]))[0]) * 20
    assert found[1] + decoded == pytest.approx(found[0], rel=0.1)
    assert found[1] < 0.75 * found[2]
    # If a rank decodes for longer than all others compute, nothing is gained by any move.
    more = [*feeds, *(replace(feeds[1], sequence=n) for n in range(30, 200))]
    plan = plan_iteration(more, [Mask()], BLOCK, 3, TILES)
    assert plan.prefill is not None
    assert stepped_bytes(plan.prefill.plans.by_mask[Mask()], SHAPE).total == 0
    # If for longer than their share, it takes nothing, and the others share the prompt.
    some = [*feeds, *(replace(feeds[1], sequence=n) for n in range(30, 60))]
    plan = plan_iteration(some, [Mask()], BLOCK, 3, TILES)
    assert plan.prefill is not None
    found = loads(plan.prefill.plans.by_mask[Mask()])
    assert found[1] == 0
    assert found[0] == pytest.approx(found[2], rel=0.1)


def test_a_faster_server_takes_more() -> None:
    strategy = eager_tiles(SHAPE, speeds=(1.0, 3.0))
    new = owned((0, 0, 1600, 0), (1, 0, 4, 1), ranks=2)
    plan = strategy.plan(nobody_holds(2), new, Mask()).plan
    seconds = server_loads(plan.tasks, plan.mask, 2, strategy.config.cost_model)
    assert seconds[1] / seconds[0] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(("cached", "moves_keys"), [(40, True), (4000, False)])
def test_a_prefix_on_another_rank(cached: int, moves_keys: bool) -> None:
    """Its keys travel, or the queries, whichever has fewer bytes, where nothing has to balance."""
    held, new = owned((0, 0, cached, 1), ranks=2), owned((0, cached, cached + 60, 0), ranks=2)
    still = eager_tiles(SHAPE, latency=1e9)
    stepped = still.plan(held, new, Mask())
    validate_stepped_plan(stepped)
    moved = stepped_bytes(stepped, SHAPE)
    keys, queries = cached * SHAPE.kv_row_bytes, 60 * SHAPE.round_trip_bytes
    assert moved.total == min(keys, queries) == (keys if moves_keys else queries)
    assert bool(moved.phases["combine"].any()) != moves_keys


def test_under_a_window_the_keys_of_a_prefix_travel() -> None:
    """Few of them do, however long the prefix is."""
    held, new = owned((0, 0, 4000, 1), ranks=2), owned((0, 4000, 4060, 0), ranks=2)
    stepped = eager_tiles(SHAPE, latency=1e9).plan(held, new, Mask(31))
    validate_stepped_plan(stepped)
    moved = stepped_bytes(stepped, SHAPE)
    assert moved.total == 31 * SHAPE.kv_row_bytes
    assert not moved.phases["combine"].any()


def test_tiles_leave_a_node_if_their_best_shape_travels_faster_than_it_is_computed() -> None:
    config = TILES.config
    shape, links, cost = config.shape, config.links, config.cost_model
    assert cost is not None
    second = np.array([1])
    of_pair = float(cost.seconds(second, second, second)[0])
    answers = []
    for surplus in np.geomspace(1e-15, 1e-10, 40).tolist():
        pairs = surplus / of_pair
        queries = np.geomspace(1e-3, 1e3, 2001) * pairs**0.5
        nbytes = queries * shape.round_trip_bytes + pairs / queries * shape.moved_kv_row_bytes
        pays = bool(nbytes.min() * 1e-9 / links.network_gb_per_s < surplus)
        assert TILES._pays_between_nodes(surplus) == pays
        answers.append(pays)
    assert {*answers} == {False, True}


@settings(max_examples=100)
@given(st.data())
def test_the_level_is_that_of_water(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    some = st.lists(st.floats(0, 10), min_size=count, max_size=count)
    busy = np.array(data.draw(some))
    speeds = 1 + np.array(data.draw(some))
    load = data.draw(st.floats(1e-3, 100))
    level = level_load(load, speeds, busy)
    filled = float((speeds * np.maximum(level - busy, 0)).sum())
    assert filled == pytest.approx(load)
    assert level_load(load, speeds) == pytest.approx(load / speeds.sum())
    assert level_load(0.0, speeds, busy) == pytest.approx(busy.min())


def test_a_window_balances_by_rows() -> None:
    """Whose first rows' keys travel, too."""
    new = owned((0, 0, 900, 0), (1, 0, 20, 1), ranks=2)
    stepped = TILES.plan(nobody_holds(2), new, Mask(31))
    validate_stepped_plan(stepped)
    found = loads(stepped)
    assert found.max() < 1.1 * found.mean()


def test_tiles_without_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="give a cost model"):
        BalancedTiles(ScheduleConfig(shape=SHAPE), 0.0)


def test_simulated_bytes_are_the_plans() -> None:
    """And the iteration is faster by them."""
    model = replace(MODELS["llama-8b"], layers=2)
    costs = InferenceCosts(model, CLUSTERS["dgx-h100"])
    shape, seconds = costs.shape, []
    cost_model = costs.cluster.inference_cost(shape)
    tiles = BalancedTiles(ScheduleConfig(0.05, shape, cost_model, links=costs.links), 3e-5)
    size = 16
    feeds = [
        ScheduledTokens(n, start, 2048, np.full((start + 2048) // size, n))
        for n, start in enumerate((100_000, 0, 3_008, 0))
    ]
    for strategy in ("pass-kv", tiles):
        plan = plan_iteration(feeds, [Mask()], size, 4, strategy)
        assert plan.prefill is not None
        found = simulate_iteration(plan, costs)
        moved = stepped_bytes(plan.prefill.plans.by_mask[Mask()], shape)
        sent = sum(int(each.sum()) for each in found.sent.values())
        assert sent == moved.total * model.layers
        assert (sent > 0) == (strategy is tiles)
        seconds.append(float(found.clock.max()))
    assert seconds[1] < 0.75 * seconds[0]
