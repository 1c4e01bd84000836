"""Weights go to a simulated GPU one after the other: the host never has all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.simgpu.machine import Machine, built_or_skip
from support.small_models import save_small_model


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_has_a_part_of_the_weights(tmp_path: Path, ranks: int) -> None:
    built_or_skip()
    folder = save_small_model("llama", tmp_path, num_hidden_layers=24)
    command = [sys.executable, "-m", "support.simgpu.loaded", str(folder), str(ranks)]
    ran = Machine().run(command)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert 0 < found["host"] < found["gpu"] / 4
