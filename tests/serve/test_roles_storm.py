"""Storms on servers whose ranks prefill or decode: no block is left, and nobody waits."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from distca.inference.models import read_model
from distca.inference.sampling import Penalties, SamplingParams
from distca.schedule.serving.cdsp import Coefficients, ImprovementRates, PrefillModel
from distca.serve.handoff.settings import Roles
from support.engines import BLOCK, one_process, settings_of, tokens
from support.role_storm import Storm
from support.small_models import save_small_model

TIMES = PrefillModel(
    "here", "small", {1: Coefficients(0, 1e-3, 0, 0), 2: Coefficients(1e-2, 5e-4, 0, 0)}
)
LEASE = 2.0
BLOCK_BYTES = 2 * 3 * 2 * 16 * 4 * BLOCK


def test_storms_leave_no_block_and_nobody_waiting(tmp_path: Path, full: bool) -> None:
    """Half of the requests are aborted at some moment, and messages of the hand-off come late. A
    decode rank is silent for longer than the lease: everyone is answered all the same. Then a rank
    is killed in the same storm: the server ends with its message, and all are told within a lease.
    """
    path = str(save_small_model("llama", tmp_path))
    loaded = read_model(path, torch.float32).load(torch.device("cpu"), "eager")
    for seed in range(10 if full else 1):
        chance, count = random.Random(seed), 400 if full else 60
        submits = [
            (
                number,
                0,
                # Some begin alike.
                tokens(chance.randint(1, 60), number % 7),
                SamplingParams(max_tokens=chance.randint(1, 6)),
                Penalties(),
            )
            for number in range(count)
        ]
        roles = Roles(
            *(2, 2, 1, "cdsp", TIMES, ImprovementRates({0.0: 0.0})),
            smallest_chunk=BLOCK,
            lease=LEASE,
        )
        settings = settings_of(path, 4, 64, cache_bytes=40 * BLOCK_BYTES, roles=roles)
        seen = Storm(settings, seed).weather(submits, 0.04)
        assert not seen.errors
        assert len(seen.answers) >= count // 2
        for number, answer in seen.answers.items():
            assert answer == one_process(loaded, submits[number]), number
        assert seen.left == [0] * 4
        assert seen.seconds < LEASE
        assert seen.gone
