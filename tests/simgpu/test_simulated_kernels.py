"""FlashAttention 3 and 4 on simulated GPUs, by stand-ins that check as the packages do."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from support.simgpu.flash_checks import checks
from support.simgpu.machine import Machine, built_or_skip

KERNELS = {"flash-attn-3": "FlashAttn3Kernel", "flash-attn-4": "FlashAttn4Kernel"}
NAMES = [*checks()]


@pytest.fixture(scope="module", params=KERNELS)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each check raised with a package; all run in one process."""
    built_or_skip()
    command = [sys.executable, "-m", "support.simgpu.flash_checks"]
    ran = Machine(packages=(request.param,)).run(command)
    assert ran.returncode == 0, ran.stderr
    its: dict[str, Any] = json.loads(ran.stdout)
    assert its["kernel"] == KERNELS[request.param]
    return its


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_attention_as_it_is_defined(found: dict[str, Any], name: str) -> None:
    assert found["results"][name] is None, found["results"][name]
