"""Who chooses what travels in a prefill: figures of this machine, and turns of a conversation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from benchmarks.serving.planned_steps import PlannedSteps
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.inference.machine import CPUS, Machine
from distca.plan import Mask, Placement, SteppedPlan
from distca.schedule.serving import (
    SELECTORS,
    STRATEGIES,
    PaperRule,
    Planned,
    Selector,
    SelectorName,
    Strategy,
)
from distca.schedule.serving.batches import PrefillBatch
from distca.simulate.serving import SimulatedSelector

SHAPE = AttentionShape(16, 2, 64, 4)


def profile_of(rate: float) -> Profile:
    """Kernel times of so many pairs a second; full rectangles of few queries take twice as long."""
    lengths = (1, 4096)
    full = tuple(tuple(q * kv / rate * (1 + (q == 1)) for kv in lengths) for q in lengths)
    diagonal = tuple(
        tuple((q * max(q, kv) - q * (q - 1) / 2) / rate for kv in lengths) for q in lengths
    )
    return Profile(lengths, full, diagonal, SHAPE, {})


@pytest.mark.parametrize("name", SELECTORS)
def test_turns_choose_what_travels(name: SelectorName) -> None:
    """A prompt passes keys, and a short turn over it queries, as fast kernels hide nothing."""
    machine = Machine.described(False, 0.01, profile_of(1e12))
    selector = machine.selector(name, SHAPE, 2)
    planner = PlannedSteps([Mask(), Mask(100)], 2, 16)
    chosen = []
    for count in (4000, 40, 4000):
        (prefill,) = planner.plan({0: count}, selector).parts
        assert isinstance(prefill, PrefillBatch)
        chosen.append(prefill.plans.by_mask[Mask()].plan.scheduler)
        assert {plan.plan.scheduler for plan in prefill.plans.by_mask.values()} == {chosen[-1]}
    assert chosen == ["pass-kv", "pass-q", "pass-kv"]


def test_a_server_simulates_the_steps_that_take_long() -> None:
    """Under a page of tokens the rule chooses, at once; both plans of a long prompt are made."""
    machine = Machine.described(False, 0.01, profile_of(1e8))
    selector = machine.selector("simulated", SHAPE, 2, hurried=4)
    for cached, tokens, expected in ((200, 64, "pass-q"), (4000, 4000, "pass-kv")):
        planner = PlannedSteps([Mask()], 2, 16)
        planner.plan({0: cached})
        made: list[str] = []
        (part,) = planner.plan({0: tokens}, Noted(selector, made)).parts
        assert isinstance(part, PrefillBatch)
        assert part.plans.by_mask[Mask()].plan.scheduler == expected
        assert made == ([] if tokens == 64 else list(STRATEGIES))


@dataclass(frozen=True)
class Noted:
    """A selector, and the strategies whose plans it asks for."""

    selector: Selector
    made: list[str]

    def choose(self, held: Placement, new: Placement, planned: Planned) -> Strategy:
        def noted(strategy: Strategy) -> SteppedPlan:
            self.made.append(strategy)
            return planned(strategy)

        return self.selector.choose(held, new, noted)


def test_what_a_choice_goes_by() -> None:
    rule = Machine.described(False, None, profile_of(1e9)).selector("paper", SHAPE, 4)
    assert isinstance(rule, PaperRule)
    assert rule.flops_per_second == pytest.approx(1e9 * 4 * 16 * 64)
    assert rule.bytes_per_second == pytest.approx(CPUS.node_gb_per_s * 1e9)
    found = Machine.described(True, 100.0, None).selector("simulated", SHAPE, 4)
    assert isinstance(found, SimulatedSelector)
    # All ranks are in one machine.
    assert (found.links.ranks_per_node, found.links.node_gb_per_s) == (4, 100.0)
    with pytest.raises(ValueError, match="run `distca profile` with these heads"):
        Machine.described(False, None, profile_of(1e9)).selector(
            "simulated", replace(SHAPE, heads=8), 4
        )
