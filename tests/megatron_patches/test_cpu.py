"""Megatron on CPUs: what its processes do as they would on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("megatron.core")

MEGABYTES = 64
KEEPS = f"""
import resource, torch
from megatron_patches.hooks import adapt_megatron_core

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({MEGABYTES} << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.ones(1)
print(*(faults() for _ in range(4)))
adapt_megatron_core()
print(*(faults() for _ in range(20)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are counted on Linux")
def test_freed_memory_stays_with_the_process() -> None:
    """Taken page by page, and not again for later tensors of the same size.

    What else is allocated may come to lie where the tensor was, but not for long.
    """
    done = subprocess.run(
        [sys.executable, "-c", KEEPS], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    before, after = ([int(count) for count in line.split()] for line in done[-2:])
    if min(before) < MEGABYTES:
        pytest.skip("this system takes memory in pages too large to count, or keeps it anyway")
    assert sum(after) < 6 * max(before)
    assert max(after[10:]) < MEGABYTES
