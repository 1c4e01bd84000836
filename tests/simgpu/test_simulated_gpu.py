"""Simulated GPUs hold real values, and show what a GPU refuses, waits for or leaves unordered."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support.simgpu.machine import Machine, built_or_skip

SOURCE = Path(__file__).parents[1] / "support/simgpu/checks.py"
NAMES = re.findall(r"@check\ndef (\w+)", SOURCE.read_text())


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """What each check raised; all run in one process."""
    built_or_skip()
    ran = Machine(devices=2).run([sys.executable, "-m", "support.simgpu.checks"])
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str | None] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_check(results: dict[str, str | None], name: str) -> None:
    assert results[name] is None, results[name]


def test_no_gpu_is_simulated_where_none_is_visible() -> None:
    built_or_skip()
    code = "import torch; print(torch.cuda.is_available())"
    ran = Machine().run([sys.executable, "-c", code], CUDA_VISIBLE_DEVICES="")
    assert ran.stdout == "False\n", ran.stderr
