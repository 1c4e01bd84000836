"""Sharing a tick's attention by the time that servers have for it beside their linear layers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.model_sizes import ModelSize
from distca.plan import LayerMasks
from distca.schedule import (
    ExecutionOptions,
    GlobalBatchPlanner,
    LinearWork,
    PlannedGlobalBatch,
    ScheduleConfig,
    documents_in_turn,
)
from distca.schedule.training.tick_speeds import load_of_a_pair, tick_speeds
from distca.simulate import CLUSTERS, ModelCosts, simulate_ticks
from support.batches import long_tailed_lengths, task_rows

MODEL = ModelSize(8, 2048, 16, 4, 128, 4096, 64_000)
STAGES, RANKS = 4, 2
COSTS = ModelCosts(MODEL, CLUSTERS["dgx-h200"])
WORK = LinearWork.of_parameters(MODEL.layer_parameters, MODEL.vocabulary_parameters, 2, 2048)


def planned(
    work: LinearWork | None, tokens: int, longest: int, options: ExecutionOptions | None = None
) -> PlannedGlobalBatch:
    """Plans, and checks, six micro-batches."""
    config = ScheduleConfig(
        shape=COSTS.shape,
        cost_model=COSTS.cluster.attention_cost(COSTS.shape),
        links=COSTS.cluster.links(1),
    )
    planner = GlobalBatchPlanner(
        np.arange(STAGES * RANKS).reshape(STAGES, RANKS),
        config,
        options or ExecutionOptions(),
        LayerMasks(),
        linear_work=work,
    )
    windows = [long_tailed_lengths(seed, RANKS * tokens, 400, longest) for seed in range(6)]
    return planner.plan(documents_in_turn(windows))


def tick_loads(batch: PlannedGlobalBatch, number: int) -> np.ndarray:
    """Pairs of each stage in a tick, mean of its ranks, over the mean of all."""
    loads = np.sum([plan.loads() for plan in batch.ticks[number].plans], axis=0)
    result: np.ndarray = loads.reshape(STAGES, RANKS).mean(axis=1) / loads.mean()
    return result


@settings(max_examples=100)
@given(
    st.just(0.0) | st.floats(1e-6, 100),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.5, 2)), min_size=2, max_size=8),
)
def test_any_work_gives_usable_speeds(attention: float, servers: list[tuple[float, float]]) -> None:
    linear, speeds = np.array(servers).T
    found = tick_speeds(attention, linear, speeds)
    assert np.isfinite(found).all()
    share, even = found / found.sum(), speeds / speeds.sum()
    assert (share >= even * 0.499).all(), "a server keeps half of its share"
    same = tick_speeds(attention, np.full_like(linear, 3.0), speeds)
    assert np.array_equal(same, speeds), "equal work changes nothing"
    # Of servers that are equally fast, one with more linear work never gets more attention.
    alike = tick_speeds(attention, linear, np.ones(len(linear)))
    assert (np.diff(alike[np.argsort(linear)]) <= 1e-9).all()


def test_servers_are_busy_until_the_same_time() -> None:
    # A quarter of the linear time, 4, counts as busy: until 40 of attention end with it, 8 each.
    linear = np.array([16.0, 16.0, 0.0, 0.0])
    found = tick_speeds(24.0, linear, np.ones(4))
    assert found == pytest.approx(np.array([4, 4, 8, 8]) / 6)
    # With less attention a server keeps half of its share; with very little, nearly all of it.
    assert tick_speeds(12.0, linear, np.ones(4)) == pytest.approx(np.array([0.5, 0.5, 1.5, 1.5]))
    little = 0.01 * linear.sum()
    kept = np.array([0.97, 0.97, 1.03, 1.03])
    assert tick_speeds(little, linear, np.ones(4)) == pytest.approx(kept)
    assert load_of_a_pair(None) == 1


def test_idle_stages_and_those_without_output_layer_take_more() -> None:
    batch = planned(WORK, 8192, 12_000)
    first = tick_loads(batch, 0)
    assert first[0] < 0.8 < 1.05 < first[1:].min()
    full = next(n for n, each in enumerate(batch.ticks) if None not in each.tick.work)
    with_head, without = tick_loads(batch, full), tick_loads(planned(None, 8192, 12_000), full)
    assert with_head[-1] < with_head[:-1].min() - 0.05
    assert abs(without - 1).max() < 0.1


@pytest.mark.parametrize("options", [ExecutionOptions("greedy"), ExecutionOptions(ping_pong=False)])
def test_plans_that_gain_nothing_stay_as_they_are(options: ExecutionOptions) -> None:
    for with_work, without in zip(
        planned(WORK, 1024, 3000, options).ticks,
        planned(None, 1024, 3000, options).ticks,
        strict=True,
    ):
        for plan, other in zip(with_work.plans, without.plans, strict=True):
            assert task_rows(plan) == task_rows(other)


@pytest.mark.parametrize(
    ("tokens", "longest", "least"), [(16_384, 30_000, 1.01), (4096, 2048, 0.995)]
)
def test_faster_with_long_documents_and_no_slower_with_short_ones(
    tokens: int, longest: int, least: float
) -> None:
    before, after = (
        simulate_ticks(planned(work, tokens, longest), COSTS).seconds for work in (None, WORK)
    )
    assert before / after > least
