"""What simulated exchanges hide behind, and the order of their events."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest

from distca.cost.volume import PHASES, plan_bytes
from distca.schedule import ExecutionOptions, PlannedGlobalBatch
from distca.simulate import (
    ModelCosts,
    simulate_ticks,
)
from support.simulated import IDEAL, MODEL, costs_on, planned


@dataclass(frozen=True)
class Timed:
    """A plan's transfer time, beside its compute."""

    plan: PlannedGlobalBatch
    costs: ModelCosts
    link_seconds: float

    def seconds(self, ablation: str = "none") -> float:
        return simulate_ticks(
            self.plan,
            self.costs,
            ablation=ablation,  # type: ignore[arg-type]
        ).seconds


def over_a_link(gb_per_s: float, ping_pong: bool, kv_heads: int = MODEL.kv_heads) -> Timed:
    """One document on two ranks: the second needs the first one's keys."""
    cluster = replace(IDEAL, network_gb_per_s=gb_per_s, node_gb_per_s=gb_per_s)
    # Without the reduction of gradients, which the link slows, too.
    costs = ModelCosts(replace(MODEL, vocab_size=1, kv_heads=kv_heads), cluster)
    plan = planned(
        [[8192, 8192]], 1, 2, ExecutionOptions("packed", ping_pong=ping_pong, free_placement=False)
    )
    moved = sum(
        int(plan_bytes(each, costs.shape).phases[phase].sum())
        for each in plan.ticks[0].plans
        for phase in PHASES
    )
    return Timed(plan, costs, costs.model.layers * moved / gb_per_s / 1e9)


def test_ping_pong_hides_an_exchange_shorter_than_the_compute_beside_it() -> None:
    free = over_a_link(1e9, ping_pong=True)
    timed = over_a_link(200.0, ping_pong=True)
    assert timed.link_seconds > 0.02 * free.seconds()
    # Three exchanges carry something for each layer and half; behind the last one nothing is left.
    one = timed.link_seconds / (3 * 2 * timed.costs.model.layers)
    assert timed.seconds() <= free.seconds() + one
    assert timed.seconds("signal") == pytest.approx(free.seconds(), rel=1e-6)
    # Each exchange is waited for where it starts; the first rank has time to spare.
    exposed = timed.seconds("single-stream") - free.seconds()
    assert 0.6 * timed.link_seconds < exposed <= timed.link_seconds * (1 + 1e-6)


@pytest.mark.parametrize("returns", [False, True])
def test_the_order_of_events(returns: bool) -> None:
    """As in the runtime, whose trace `tests/training/test_order_of_events.py` tests."""
    costs = costs_on(replace(IDEAL, copy_gb_per_s=1000.0), layers=2)
    # The second document's queries help the first one's rank, or each rank has a half of one.
    lengths = [12288, 4096] * 2 if returns else [16384] * 2
    plan = planned(
        [lengths], 1, 2, ExecutionOptions("greedy" if returns else "packed", free_placement=False)
    )
    moved = [plan_bytes(each, costs.shape).phases["combine"].any() for each in plan.ticks[0].plans]
    assert moved == 2 * [returns]
    spans = simulate_ticks(plan, costs, recording=True).spans
    of_rank = sorted((s for s in spans if s.rank == 0), key=lambda s: s.start)
    found = [
        f"{s.name} {s.args['layer']} {s.args['nano_batch']}"
        for s in of_rank
        if s.name.removesuffix(" backward") in ("dispatch", "core attention")
    ]
    ahead, late = "dispatch 1 ping", "core attention 0 pong"
    there = [
        *("dispatch 0 ping", "dispatch 0 pong", "core attention 0 ping"),
        *((late, ahead) if returns else (ahead, late)),
        *("dispatch 1 pong", "core attention 1 ping", "core attention 1 pong"),
    ]
    # Before the loss is known, or after it.
    sent = ["dispatch backward 1 pong", "dispatch backward 1 ping"]
    computed = ["core attention backward 1 pong", "core attention backward 1 ping"]
    sent_ahead = ["dispatch backward 0 pong", "dispatch backward 0 ping"]
    by_nano_batch = zip(computed, sent_ahead, strict=True)
    back = [
        *(sent + (computed + sent_ahead if returns else list(itertools.chain(*by_nano_batch)))),
        *("core attention backward 0 pong", "core attention backward 0 ping"),
    ]
    assert found == there + back


def test_a_pass_begins_and_ends_with_its_own_linear_layers() -> None:
    """There from the projections on, back to them."""
    costs = costs_on(IDEAL)
    plan = planned([[1024] * 4], 1, 2, ExecutionOptions("packed", ping_pong=False))
    outcome = simulate_ticks(plan, costs, recording=True)
    kernels = [s for s in outcome.spans if s.rank == 0 and s.name.startswith("core attention")]
    there, back = (costs.pre_seconds()[number] * 2048 for number in (0, 1))
    assert min(s.start for s in kernels) == pytest.approx(there, rel=1e-6)
    last = max(s.end for s in kernels)
    assert outcome.seconds - last == pytest.approx(back, rel=1e-6)


def test_whole_micro_batches_hide_what_is_sent_ahead_alone() -> None:
    gradient = 1e-4
    for speed in (50.0, 5.0, 0.5):
        timed = over_a_link(speed, ping_pong=False)
        # One document in each half: no rank needs anything of the other.
        assert timed.link_seconds == 0
        ranks = planned([[16384]], 1, 2, ExecutionOptions("packed", ping_pong=False))
        moved = plan_bytes(ranks.ticks[0].plans[0], timed.costs.shape)
        link = timed.costs.model.layers * moved.total / speed / 1e9
        slow = simulate_ticks(ranks, timed.costs).seconds
        free = simulate_ticks(ranks, costs_on(IDEAL, vocab_size=1)).seconds
        # The second rank has most to do: it waits for the first one's keys, and gives back theirs.
        # In between they are sent again, but for one of four layers while others compute.
        exposed = slow - free
        assert link * (1 / 3 + 1 / 4 / 3) * 0.99 < exposed < link * 1.01 + gradient / speed * 50
