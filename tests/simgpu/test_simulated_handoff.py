"""Keys and values leave a prefill rank's simulated GPU without a wait of the host."""

from __future__ import annotations

import json
import sys

from support.simgpu.machine import Machine, built_or_skip
from support.simgpu.sent_rows import EXPECTED


def test_rows_leave_by_pinned_memory_beside_the_computation() -> None:
    built_or_skip()
    ran = Machine().run([sys.executable, "-m", "support.simgpu.sent_rows"])
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == EXPECTED
