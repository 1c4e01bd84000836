"""Launches of a layer in decode steps without graphs, beside those of transformers' own layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.simgpu.machine import Machine, built_or_skip

BUDGETS: dict[str, dict[str, int]] = json.loads(
    (Path(__file__).parent / "layer_budgets.json").read_text()
)
"""Most launches of three layers, by family: with one rank and with two, and of transformers."""
IN_CI = "llama", "gpt_oss"
FULL = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.full) for name in BUDGETS]


@pytest.fixture(scope="module")
def launches(full: bool) -> dict[str, dict[str, int]]:
    """What each family launches; all run in one process."""
    built_or_skip()
    command = [sys.executable, "-m", "support.simgpu.layers", *(BUDGETS if full else IN_CI)]
    ran = Machine(2).run(command, seconds=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("family", FULL)
def test_layers_keep_to_their_budgets(launches: dict[str, dict[str, int]], family: str) -> None:
    """A change that costs more launches shows as a larger number in `layer_budgets.json`."""
    spent, budget = launches[family], BUDGETS[family]
    assert all(spent[each] <= budget[each] for each in ("1 rank", "2 ranks")), (spent, budget)
    # Those of transformers are for comparison.
    assert spent["transformers"] == budget["transformers"], spent
