"""Steps of plans whose tiles moved: tiles from other nodes come last, and outputs are right."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, Plan, SteppedPlan, validate_stepped_plan
from distca.schedule import move_tiles
from distca.schedule.base import task_loads, tasks_at_home
from distca.schedule.serving import balanced, nobody_holds
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.tile_steps import _first_at_home, in_steps
from support.balanced import BLOCK, eager_tiles
from support.stepped import run_virtually

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16, dtype_bytes=4)


def prompts(*lengths: tuple[int, int], ranks: int) -> Placement:
    """Whole prompts `(tokens, rank)`."""
    numbers = np.arange(len(lengths))
    tokens, rank = np.array(lengths, dtype=np.int64).T
    return Placement(numbers, np.zeros_like(numbers), tokens, rank, ranks)


def nodes_of_tasks(stepped: SteppedPlan, of_node: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes of the server and of the owner of each task, where prompts have one owner."""
    plan = stepped.plan
    owner = np.zeros(len(plan.lengths), dtype=np.int64)
    owner[plan.placement.document] = plan.placement.rank
    return plan.tasks.server // of_node, owner[plan.tasks.document] // of_node


NEW = prompts((1600, 0), (40, 1), (200, 1), (300, 2), (20, 2), (60, 3), ranks=4)


def test_tiles_of_other_nodes_are_computed_last() -> None:
    stepped = eager_tiles(SHAPE, ranks_per_node=2).plan(nobody_holds(4), NEW, Mask())
    validate_stepped_plan(stepped)
    assert stepped.steps == 3
    server, owner = nodes_of_tasks(stepped, 2)
    assert ((stepped.step == 2) == (server != owner)).all()
    # A rank that waits for nothing does not hold back the rows of the last step.
    first = stepped.plan.tasks[stepped.step == 0]
    assert {*first.server.tolist()} == {1, 3}
    # In one node there are none.
    one = prompts((1600, 0), (40, 1), (36, 2), (1, 3), ranks=4)
    assert eager_tiles(SHAPE).plan(nobody_holds(4), one, Mask()).steps == 2


@settings(max_examples=30)
@given(st.data(), st.sampled_from([1, 2, 3]), st.none() | st.integers(0, 40))
def test_outputs_are_those_of_dense_attention(
    data: st.DataObject, of_node: int, window: int | None
) -> None:
    ranks = data.draw(st.integers(3, 5))
    each = st.tuples(st.integers(1, 150), st.integers(0, ranks - 1))
    new = prompts(*data.draw(st.lists(each, min_size=2, max_size=5)), ranks=ranks)
    strategy = eager_tiles(SHAPE, ranks_per_node=of_node)
    run_virtually(strategy.plan(nobody_holds(ranks), new, Mask(window)), SHAPE, torch.float32)


def test_a_plan_of_three_steps_is_exact() -> None:
    stepped = eager_tiles(SHAPE, ranks_per_node=2).plan(nobody_holds(4), NEW, Mask())
    assert stepped.steps == 3
    run_virtually(stepped, SHAPE, torch.float32)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1, 2, 64]), st.none() | st.integers(0, 40))
def test_plans_are_the_same_without_the_bound_of_the_gain(
    data: st.DataObject, of_node: int, window: int | None
) -> None:
    """What decides that nothing moves never stops a move that is predicted to pay."""
    ranks = data.draw(st.integers(2, 5))
    each = st.tuples(st.integers(1, 150), st.integers(0, ranks - 1))
    new = prompts(*data.draw(st.lists(each, min_size=2, max_size=6)), ranks=ranks)
    # From free exchanges to those that take as long as the attention of 100 tokens.
    latency = data.draw(st.sampled_from([0.0, 1e-2, 0.1, 0.5, 1.5]))
    strategy = eager_tiles(SHAPE, latency=latency, ranks_per_node=of_node)
    with_bound = strategy.plan(nobody_holds(ranks), new, Mask(window))
    with mock.patch.object(BalancedTiles, "_may_gain", return_value=True):
        without = strategy.plan(nobody_holds(ranks), new, Mask(window))
    for name in ("document", "q_start", "q_end", "kv_start", "kv_end", "server"):
        columns = (getattr(each.plan.tasks, name).tolist() for each in (with_bound, without))
        assert next(columns) == next(columns)
    assert with_bound.step.tolist() == without.step.tolist()


@pytest.mark.parametrize(("sources", "given_document"), [([0, 2], 1), ([2, 0], 0), (None, None)])
def test_links_of_those_who_send_rows_are_charged(
    sources: list[int] | None, given_document: int | None
) -> None:
    """Of two equal tasks that one rank computes, that one goes whose rows are in the node."""
    new = prompts((800, 0), (800, 0), (4, 3), ranks=4)
    plan = Plan(np.array([800, 800, 4]), new, tasks_at_home(new, Mask()), Mask(), BLOCK)
    config = eager_tiles(SHAPE, tolerance=0.3, ranks_per_node=2).config
    # Ranks 1 and 2 compute something else.
    busy = np.array([0.0, 1e9, 1e9, 0.0])
    moved = move_tiles(
        plan, config, busy, sources=None if sources is None else np.array([*sources, 3])
    )
    given = {*moved.tasks.document[moved.tasks.server == 3].tolist()} - {2}
    assert given
    if given_document is not None:
        assert given == {given_document}
    assert in_steps(moved, config).steps == 2


def test_the_shortest_tasks_at_home_hide_the_rows_of_tiles() -> None:
    """As many as begin before the rows are there, on each rank; none where none are awaited."""
    new = prompts((40, 0), (10, 1), (20, 0), (50, 1), (30, 0), (25, 2), ranks=3)
    plan = Plan(np.array([40, 10, 20, 50, 30, 25]), new, tasks_at_home(new, Mask()), Mask(), BLOCK)
    config = eager_tiles(SHAPE).config
    loads = task_loads(plan.tasks, Mask(), config.cost_model)
    seconds = dict(zip(plan.tasks.document.tolist(), loads.tolist(), strict=True))
    hidden = np.array([seconds[2] + 0.5 * seconds[4], 0.0, 9 * seconds[5]])
    chosen = _first_at_home(plan, np.ones(len(plan.tasks), dtype=bool), hidden, config)
    assert {*plan.tasks.document[chosen].tolist()} == {2, 4, 5}
    # Without the shortest one the next hides all.
    chosen = _first_at_home(plan, plan.tasks.document != 2, hidden, config)
    assert {*plan.tasks.document[chosen].tolist()} == {4, 5}


@pytest.mark.parametrize("lengths", [(400, 400, 5, 5), (800, 400, 200, 5)])
def test_ranks_that_wait_for_another_node_get_less(lengths: tuple[int, ...]) -> None:
    """Kernels are so fast that rows between nodes take about as long as their attention."""
    new = prompts(*((length, rank) for rank, length in enumerate(lengths)), ranks=4)
    strategy = eager_tiles(SHAPE, ranks_per_node=2, flops_per_second=2.5e12)
    held, nothing = nobody_holds(4), np.zeros(4)
    sooner = strategy.plan(held, new, Mask())
    with mock.patch.object(balanced, "seconds_apart", return_value=nothing):
        later = strategy.plan(held, new, Mask())
    assert sooner.plan.loads()[2:].sum() < 0.8 * later.plan.loads()[2:].sum()
    assert strategy.seconds(sooner, nothing) < 0.97 * strategy.seconds(later, nothing)
    validate_stepped_plan(sooner)
    run_virtually(sooner, SHAPE, torch.float32)


@settings(max_examples=30)
@given(st.data())
def test_tiles_of_a_pool_do_not_depend_on_other_pools(data: st.DataObject) -> None:
    """Although pools move theirs in common rounds."""
    each = st.tuples(st.integers(1, 400), st.integers(0, 5))
    new = prompts(*data.draw(st.lists(each, min_size=2, max_size=10)), ranks=6)
    plan = Plan(new.end, new, tasks_at_home(new, Mask()), Mask(), BLOCK)
    config = eager_tiles(SHAPE, ranks_per_node=2).config

    def tasks_of(servers: range, pools: list[int]) -> list[list[int]]:
        t = move_tiles(plan, config, pools=np.array(pools)).tasks
        columns = (t.server, t.document, t.q_start, t.q_end, t.kv_start, t.kv_end)
        rows = zip(*(each.tolist() for each in columns), strict=True)
        return sorted([*row] for row in rows if row[0] in servers)

    together = [0, 0, 0, 1, 1, 1]
    assert tasks_of(range(3), together) == tasks_of(range(3), [0, 0, 0, 1, 2, 3])
    assert tasks_of(range(3, 6), together) == tasks_of(range(3, 6), [0, 1, 2, 3, 3, 3])
