"""The device transport's kernels on a GPU. Not run on any yet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.transport.device import BLOCKS
from support.bulk_sizes import BULK_LEAST, CHUNK, RING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROOT = Path(__file__).parents[2]


def run_script(*arguments: str, under: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*under, sys.executable, "-m", "support.virtual_ranks", *arguments],
        env=os.environ
        | {
            "CUDA_MODULE_LOADING": "EAGER",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize("mode", ["kernel", "copy-engine"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_virtual_ranks(ranks: int, mode: str) -> None:
    said = run_script("--ranks", str(ranks), "--exchanges", "400", "--mode", mode)
    assert ": 0 bytes wrong" in said


@pytest.mark.parametrize("bulk", ["--bulk", "--no-bulk"])
def test_sizes_around_those_of_bulk_copies(bulk: str) -> None:
    """Each block sends a part of each message.

    Messages of an odd size lie unaligned, but those from rank 1 to 2 and back alike at both ends:
    their bulk copies have edges.
    """
    of_a_part = [BULK_LEAST, RING, RING + CHUNK, 2 * RING + 16]
    sizes = [BLOCKS * part + more for part in of_a_part for more in (-513, -16, -1, 0, 1, 16, 512)]
    said = run_script(
        *("--ranks", "3", "--exchanges", str(8 * len(sizes)), bulk, "--sizes"), *map(str, sizes)
    )
    assert ": 0 bytes wrong" in said


def test_virtual_ranks_under_compute_sanitizer() -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    said = run_script("--exchanges", "30", under=("compute-sanitizer", "--error-exitcode", "9"))
    assert "ERROR SUMMARY: 0 errors" in said


def test_a_rank_that_sends_nothing_is_named() -> None:
    """Rank 1 never sends: what was to be received is not-a-number, and a timeout names it."""
    from support.exchanges import CHANNELS
    from support.virtual_ranks import VirtualRanks

    virtual = VirtualRanks(3, 1000, timeout=1.0)
    matrix = np.full((3, 3), 400) - np.diag([400] * 3)
    virtual.start(CHANNELS[0], 0, matrix, senders=(0, 2))
    received = virtual.arenas[0][:800]
    virtual.endpoints[0].wait(0, 1, received, virtual.streams[0][CHANNELS[0]])
    failure = virtual.failures()[0]
    assert failure is not None
    assert "waited for the message of rank 1 in exchange 1 of channel 'dispatch' 0" in failure
    assert "rank 1 did nothing for 1 s" in failure
    assert bool(received.view(torch.float32).isnan().all())
