"""What the log of a run says of plans that are above the tolerance."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from distca.plan import Mask, place_in_turn
from distca.schedule import PlannedGlobalBatch, ScheduleConfig, make_scheduler, tick_schedule
from megatron_patches.batches.plan_log import ToleranceWarning, why_above_tolerance

CONFIG, NOTHING = ScheduleConfig(tolerance=0.05), tick_schedule(1, 1)


def plan_of(*lengths: int):
    """Plan by tiles for two ranks, on which documents lie in turn."""
    placement = place_in_turn(np.array(lengths), np.full(2, sum(lengths) // 2))
    return make_scheduler("tiles", CONFIG).schedule(np.array(lengths), placement, Mask())


def test_only_plans_that_are_above_it_have_a_reason() -> None:
    # A document of one block is not cut, and two of half a block weigh less.
    above, within = plan_of(128, 64, 64), plan_of(128, 128)
    assert above.notes
    assert why_above_tolerance([within, above], CONFIG) == above.notes[0]
    assert why_above_tolerance([within], CONFIG) is None
    # The number is that of the plan's loads, whatever the note's was made of.
    other = replace(above, notes=("the busiest server has 9.000 times: no tile",))
    found = why_above_tolerance([other], CONFIG)
    assert found is not None
    assert found.endswith("above the tolerance of 0.05: no tile")
    assert "9.000" not in found
    # Pools need not have equal loads.
    assert why_above_tolerance([above], CONFIG, np.array([[0], [1]])) is None
    # Balanced in the end, after its stages' plans were not.
    assert why_above_tolerance([replace(within, notes=above.notes)], CONFIG) is None


@pytest.mark.parametrize(("rank", "serves_only"), [(0, False), (1, False), (0, True)])
def test_the_log_tells_the_first_of_them(
    rank: int, serves_only: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    above, within = plan_of(128, 64, 64), plan_of(128, 128)
    warning = ToleranceWarning(CONFIG, serves_only)
    with caplog.at_level(logging.WARNING):
        for sample, plan in {0: within, 6: above, 12: above}.items():
            of_ticks: Any = (SimpleNamespace(plans=(within, plan)),)
            warning.check(PlannedGlobalBatch(NOTHING, np.array([[0, 1]]), (), of_ticks), sample)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == (rank == 0 and not serves_only)
    assert all(f"from sample 6 on, {above.notes[0]}" in message for message in logged)
