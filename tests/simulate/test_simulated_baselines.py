"""Simulated baselines: 1F1B's bubbles, context-parallel groups, WLB-LLM's bins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.schedule import ExecutionOptions
from distca.simulate import (
    BaselineLayout,
    simulate_baseline,
    simulate_ticks,
)
from distca.simulate.bins import Bins
from distca.simulate.one_f_one_b import order_of_1f1b
from support.batches import long_tailed_lengths
from support.simulated import IDEAL, costs_on, passes, planned


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (4, 6), (4, 2)])
def test_equal_passes_have_the_bubbles_of_1f1b(stages: int, micro_batches: int) -> None:
    # Without an output layer all stages are alike.
    costs = costs_on(IDEAL, vocab_size=1)
    head = sum(costs.head_seconds())
    seconds = sum(passes(costs, 1024, 4 // stages, False))
    expected = (micro_batches + stages - 1) * seconds
    windows = [[1024, 1024]] * micro_batches
    apart = ExecutionOptions("packed", ping_pong=False, pool_stages=False)
    ticks = simulate_ticks(planned(windows, stages, 2, apart), costs)
    lengths = np.full(2 * micro_batches, 1024)
    layout = BaselineLayout(stages, 2, 1, micro_batches)
    usual = simulate_baseline("plain", lengths, layout, costs)
    slack = 2 * micro_batches * 1024 * head
    assert expected <= ticks.seconds <= expected + slack
    assert expected <= usual.seconds <= expected + slack
    assert ticks.computed == pytest.approx(usual.computed)
    # Idle stages serve: less than that.
    pooled = ExecutionOptions("tiles", ping_pong=False)
    assert simulate_ticks(planned(windows, stages, 2, pooled), costs).seconds < ticks.seconds


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_1f1b_runs_every_pass_once_in_order(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        order = order_of_1f1b(stage, stages, micro_batches)
        for forward in (True, False):
            assert [n for f, n in order if f == forward] == list(range(micro_batches))
        in_flight = np.cumsum([1 if forward else -1 for forward, _ in order])
        assert in_flight.min() >= 0
        assert in_flight.max() == min(micro_batches, stages - stage)


def test_context_parallel_ranks_wait_for_the_gathered_keys() -> None:
    cluster = replace(IDEAL, network_gb_per_s=10.0)
    costs = costs_on(cluster, vocab_size=1)
    # Long enough for the backward pass to hide the reduction of gradients.
    lengths = np.full(4, 65_536)
    free = simulate_baseline("per-document-cp", lengths, BaselineLayout(1, 1, 16, 1), costs)
    nothing = simulate_baseline(
        "per-document-cp", lengths, BaselineLayout(1, 1, 16, 1), costs_on(IDEAL, vocab_size=1)
    )
    # There and back in each layer, 15 of 16 parts of all keys and values come over the links: a
    # node has one for each of its 8 ranks.
    gathered = 4 * 65_536 * costs.shape.kv_row_bytes * 15 // 16
    expected = 2 * costs.model.layers * gathered / 80e9
    assert free.seconds - nothing.seconds == pytest.approx(expected, rel=1e-3)
    assert free.gathering == pytest.approx(expected, rel=1e-3)
    # Documents of a length are shared out equally: nobody waits for others.
    assert free.exposed == pytest.approx(free.gathering, rel=1e-3)
    assert free.bytes_sent["shared forward"].tolist() == [costs.model.layers * gathered] * 16


def test_ranks_of_a_group_wait_for_its_slowest() -> None:
    costs = costs_on(IDEAL, vocab_size=1)
    # One document in each bin of two ranks, all of which is on the first rank's half, or shared.
    lengths = np.array([4096, *[128] * 32, 4096, *[128] * 32])
    outcome = simulate_baseline("wlb-llm", lengths, BaselineLayout(1, 2, 2, 1), costs)
    assert not outcome.gathering.max() > 1e-9
    # What is neither computed nor waited for is the wait of replicas for each other, at the end.
    of_replicas = (outcome.computed + outcome.exposed).reshape(2, 2)
    assert of_replicas[:, 0] == pytest.approx(of_replicas[:, 1])
    assert of_replicas.max() == pytest.approx(outcome.seconds, rel=1e-6)
    launched = simulate_baseline(
        "wlb-llm",
        lengths,
        BaselineLayout(1, 2, 2, 1),
        costs_on(replace(IDEAL, launch_seconds=1e-3), vocab_size=1),
    )
    # A kernel of each layer, there and back.
    assert launched.computed - outcome.computed == pytest.approx(2 * 4 * 1e-3)


def test_wlb_llm_balances_all_work_of_bins() -> None:
    costs = costs_on(IDEAL)
    lengths = long_tailed_lengths(0, 64 * 4096, 1000, 16384)
    layout = BaselineLayout(1, 4, 2, 2)
    wlb = simulate_baseline("wlb-llm", lengths, layout, costs)
    lengths = lengths[np.argsort(lengths)]
    with pytest.raises(ValueError, match="crosses the end"):
        simulate_baseline("plain", lengths, BaselineLayout(1, 8, 1, 2), costs)
    ideal = wlb.computed.mean()
    assert wlb.seconds < 1.1 * ideal
    assert wlb.tokens == 64 * 4096


@pytest.mark.parametrize(
    ("name", "in_order"), [("plain", True), ("per-document-cp", True), ("wlb-llm", False)]
)
def test_only_wlb_llm_runs_its_heaviest_bins_first(name: str, in_order: bool) -> None:
    """The others have no choice: micro-batches come as the documents do."""
    costs = costs_on(IDEAL)
    attention = costs.cluster.attention_cost(costs.shape)
    lengths = np.array([128] * 64 + [8192])
    bins = Bins.of(name, lengths, BaselineLayout(1, 1, 1, 2), costs, attention)
    light, heavy = sorted(bins.shared.attention.ravel().tolist())
    assert heavy > 10 * light
    assert (bins.shared.attention.ravel().tolist() == [light, heavy]) is in_order
