"""Seconds of plans for thousands of servers, on the pages that name them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "planning_at_scale.md"


def spans(column: str) -> list[str]:
    """The least and the greatest seconds for 4,096 and for 16,384 servers."""
    lines = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    place = [name.strip("| ") for name in lines[0]].index(column)
    found = []
    for servers in ("4,096", "16,384"):
        seconds = [float(line[place].strip("| ")) for line in lines if line[1] == servers]
        found.append(f"{min(seconds):.1f} to {max(seconds):.1f}")
    return found


def test_large_plans() -> None:
    whole, of_pools = spans("plan s"), spans("in pools of 8: plan s")
    index = (ROOT / "benchmarks" / "README.md").read_text()
    assert f"{whole[0]} s for 4,096 servers, {whole[1]} s for 16,384. In server pools" in index
    assert f"pools of 8: {of_pools[0]} s and {of_pools[1]} s: [planning_at_scale" in index
    planning = re.sub(r"\s+", " ", (ROOT / "docs" / "planning.md").read_text())
    said = f"4,096 servers in {whole[0]} seconds, and for 16,384 in {whole[1]} seconds ("
    assert said in planning
