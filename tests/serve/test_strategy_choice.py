"""Who chooses what travels in a prefill: figures of this machine, and turns of a conversation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.plan import Mask
from distca.schedule.serving import SELECTORS, PaperRule, SelectorName
from distca.schedule.serving.blocks import BlockPool
from distca.serve.selection import CPUS, Machine
from distca.serve.step_planner import Prefill, StepPlanner
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
    planner = StepPlanner(BlockPool(2, 100, 128), [Mask(), Mask(100)], 16)
    chosen = []
    for count in (4000, 40, 4000):
        (prefill,) = planner.plan({0: count}, selector, False).parts
        assert isinstance(prefill, Prefill)
        chosen.append(prefill.plans[Mask()].scheduler)
        assert {plan.scheduler for plan in prefill.plans.values()} == {chosen[-1]}
    assert chosen == ["pass-kv", "pass-q", "pass-kv"]


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
