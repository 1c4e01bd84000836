"""The benchmark of dedicated attention servers: what it tries, simulates and reports."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.cluster import dedicated
from benchmarks.cluster.dedicated import Division, divisions, in_short, outcome, report
from distca.simulate import Outcome

JOB = (131_072, 48)


def told(seconds: float, gigabytes: float, busy: tuple[float, float]) -> Outcome:
    """An iteration in which 24 servers with the model and 8 without it compute for a time each."""
    computed = np.repeat(busy, [24, 8])
    memory = np.repeat([gigabytes, 10.0], [24, 8]) * 1e9
    zeros = np.zeros(32)
    return Outcome(seconds, 1, 64, memory, 145e9, computed, zeros, zeros, {})


def test_every_division_divides_the_job() -> None:
    for context, sequences in dedicated.JOBS:
        found = divisions(context, sequences)
        assert len(set(found)) == len(found)
        assert {each.dedicated for each in found} == {0, 8, 16}
        # Speeds are of dedicated servers.
        assert {each.speed for each in found if not each.dedicated} == {1.0}
        assert {each.speed for each in found if each.dedicated} == {1.0, 2.0, 3.0, 4.0}
        for each in found:
            tokens = sequences // each.micro_batches * context
            assert sequences % each.micro_batches == 0
            assert tokens % (2 * (dedicated.SERVERS - each.dedicated)) == 0
    # Nothing of 7 sequences is a whole number of them in 8, 16 or 24 micro-batches.
    assert divisions(131_072, 7) == []


@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_dedicated_servers_compute_attention_alone(speed: float) -> None:
    """Faster servers are given more of it; the model's layers run on all others."""
    lengths = [np.array([18_000, 3000, 2000, 1576])] * 8
    found = outcome(Division(8, speed, 8), lengths)
    assert (found.gpus, found.tokens) == (64, 8 * 24_576)
    with_model, without = found.computed[:24], found.computed[24:]
    assert 0 < without.max() < with_model.min()
    assert found.memory_bytes[24:].max() < 0.3 * found.memory_bytes[:24].min()
    equal = outcome(Division(8, 1.0, 8), lengths).computed[24:]
    assert speed == 1 or without.sum() > 1.2 * equal.sum()


def test_a_row_has_the_fastest_division_that_fits() -> None:
    outcomes = {
        Division(0, 1.0, 8): [told(1.0, 100, (0.9, 0.9)), told(1.1, 90, (0.9, 0.9))],
        # Slower in all batches together, though faster in one.
        Division(0, 1.0, 16): [told(0.9, 100, (0.9, 0.9)), told(1.3, 90, (0.9, 0.9))],
        Division(8, 1.0, 8): [told(2.0, 120, (2.0, 0.5)), told(2.0, 120, (2.0, 0.5))],
        Division(8, 2.0, 8): [told(1.25, 120, (1.0, 0.5)), told(1.25, 110, (1.0, 0.5))],
        # In the second batch it is out of memory.
        Division(8, 3.0, 8): [told(1.0, 120, (1.0, 0.5)), told(1.0, 146, (1.0, 0.5))],
        Division(16, 1.0, 8): [told(0.5, 150, (0.5, 0.5)), told(0.5, 150, (0.5, 0.5))],
    }
    every, eight, sixteen = report(JOB, outcomes)
    assert every[:6] == ["128K", "32", "0", "8", "-", "1.000 (1.000 to 1.000)"]
    # 2.1 s over 2.5; single batches 1 over 1.25 and 1.1 over 1.25.
    assert eight[:6] == ["128K", "24", "8", "8", "2", "0.840 (0.800 to 0.880)"]
    assert eight[6:] == ["20.0%", "60.0%", "120, 10"]
    assert sixteen == ["128K", "16", "16", *["out of memory"] * 6]
    assert in_short([every, eight]) == (
        "In short: 0.840 (128K, 8 of 32 servers dedicated) times as fast as with the model on "
        "all servers."
    )


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one small job; each batch of it is simulated in all divisions."""
    ran: list[tuple[Division, int]] = []

    def counted(division: Division, sequences: list[np.ndarray]) -> Outcome:
        ran.append((division, int(sum(map(np.sum, sequences)))))
        return told(1.0 + division.dedicated / 32, 100, (0.9, 0.4))

    monkeypatch.setattr(dedicated, "JOBS", [(8192, 24)])
    monkeypatch.setattr(dedicated, "outcome", counted)
    with patch.object(sys, "argv", ["dedicated", "--batches", "2", "--output", str(tmp_path)]):
        dedicated.main()
    tried = divisions(8192, 24)
    assert ran == [(each, 24 * 8192) for each in tried for _ in range(2)]
    page = (tmp_path / "dedicated.md").read_text()
    assert "`python benchmarks/cluster/dedicated.py --batches 2 --output DIR`" in page
    assert "2 global batches of 24 sequences of 8K tokens" in page
    assert "| 8K | 24 | 8 | 8 | 1 | 0.800 (0.800 to 0.800) |" in page
