"""Figures of simulated jobs beside their peers, on the front page and in the index."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
INDEX = ROOT / "benchmarks" / "README.md"


def test_jobs_beside_peers() -> None:
    """What README and the index say of the simulated jobs is what their page has."""
    found = json.loads((RESULTS / "cluster" / "beside_peers.json").read_text())
    ratios = [each["ratio"] for each in found.values() if all(each["fits"])]
    typical = geometric_mean(ratios)
    readme = (ROOT / "README.md").read_text()
    behind = {0: "none"}[sum(ratio < 1 - 1e-6 for ratio in ratios)]
    of_all = f"{min(ratios):.3f} to {max(ratios):.3f} times as fast"
    assert (
        f"In {len(ratios)} named jobs DistCA is {of_all} as the fastest peer, {typical:.3f} in the "
        "geometric"
    ) in readme
    assert f"and slower in {behind} (" in readme
    index = INDEX.read_text()
    assert f"In {len(ratios)} of {len(found)} named jobs DistCA and a peer fit in memory." in index
    assert f"DistCA is {of_all} as the fastest peer, {typical:.3f} in the geometric" in index
    assert sum(round(ratio, 3) <= 1.01 for ratio in ratios) == 4
    assert "Four gain 1% or less" in index
    dynamic = [each["dynamic"] for each in found.values() if each["dynamic"] > 0]
    slower = sum(ratio < 1 - 1e-6 for ratio in dynamic)
    assert f"fits in {len(dynamic)} of the named jobs" in readme
    assert (
        f"DistCA is {min(dynamic):.3f} to {max(dynamic):.3f} times as fast as dynamic context "
        f"parallelism, {geometric_mean(dynamic):.3f} in the geometric mean, and slower in {slower}."
    ) in readme
    drawn = json.loads((RESULTS / "cluster" / "drawn_jobs.json").read_text())
    ratios = [each["ratio"] for each in drawn.values() if all(each["fits"])]
    behind, neither = (
        sum(ratio < 1 - 1e-6 for ratio in ratios),
        sum(not any(each["fits"]) for each in drawn.values()),
    )
    of_all = f"{min(ratios):.3f} to {max(ratios):.3f} times as fast"
    assert len(drawn) == len(ratios) + neither
    assert (
        f"In {len(ratios)} of {len(drawn)} drawn jobs DistCA and a peer fit, in {neither} neither."
        in index
    )
    assert (
        f"{of_all}, {geometric_mean(ratios):.3f} in the geometric mean, and slower in {behind}."
        in index
    )
    assert (
        f"In {len(ratios)} of {len(drawn)} randomly drawn jobs, DistCA and a peer fit in memory. "
        f"There DistCA is {of_all} as the fastest peer, and slower in {behind} ([drawn"
    ) in readme
