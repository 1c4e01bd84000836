"""Changes of the project's files, each run in a job on simulated GPUs; see `mutant_runs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.simgpu.machine import Machine, built_or_skip

Change = tuple[str, dict[str, str]]
"""Name of a job, and the sources of files that are changed, by path."""


def run_changes(changes: Sequence[Change], folder: Path) -> list[str]:
    """Runs the job of each change, and skips the test where that is not possible.

    Args:
        changes: changes in any order.
        folder: folder for the files between processes.

    Returns:
        Why each change is seen; empty where it is not.
    """
    built_or_skip()
    pytest.importorskip("megatron.training")
    told = folder / "changes.json"
    told.write_text(json.dumps(changes))
    command = [sys.executable, "-m", "support.simgpu.mutant_runs", str(told)]
    ran = Machine(2).run(command, seconds=3600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]
