"""Weights go to a simulated GPU one after the other: the host never has all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.simgpu.machine import Machine, built_or_skip
from support.small_models import save_small_model


def test_the_host_has_a_part_of_the_weights(tmp_path: Path) -> None:
    """With one rank, and with two that share layers."""
    built_or_skip()
    folder = save_small_model("llama", tmp_path, num_hidden_layers=24)
    command = [sys.executable, "-m", "support.simgpu.loaded", str(folder), "1", "2"]
    ran = Machine().run(command)
    assert ran.returncode == 0, ran.stderr
    alone, shared = json.loads(ran.stdout)
    for found in (alone, shared):
        assert 0 < found["host"] < found["gpu"] / 4
    assert shared["gpu"] < alone["gpu"]
