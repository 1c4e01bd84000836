"""Benchmarks of serving say what they charge: overheads, or their absence, by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SERVING = Path(__file__).parents[2] / "benchmarks" / "serving"
LEFT_OUT = {
    "prefill_trace.py": "charges 10 ms of the host for each iteration, as its page says",
    "sparse_degradation.py": "compares times of one model with each other",
    "sparse_prefill.py": "describes CPUs, whose rates it measures",
    "cache_balancing.py": "tells what moves add to a prefill, at most",
    "balanced_prompts.py": "simulates tiles, whose page says what it charges",
}
"""Benchmarks that leave them out, and why."""


def calls_without_overheads(source: str) -> list[int]:
    """Lines that build `InferenceCosts` without saying what iterations cost beside their work."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InferenceCosts":
            starred = any(isinstance(each, ast.Starred) for each in node.args)
            named = any(each.arg in ("overheads", None) for each in node.keywords)
            if not (starred or named or len(node.args) > 5):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", sorted(SERVING.rglob("*.py")), ids=lambda path: path.name)
def test_costs_of_inference_name_their_overheads(path: Path) -> None:
    if path.name not in LEFT_OUT:
        assert calls_without_overheads(path.read_text()) == []


def test_a_call_that_forgets_them_is_found() -> None:
    forgets = "InferenceCosts(model, cluster, 8, mlp_dtype_bytes=1)"
    names = "InferenceCosts(model, cluster, overheads=NO_OVERHEADS)"
    assert calls_without_overheads(f"a = {names}\nb = {forgets}") == [2]
    assert calls_without_overheads("InferenceCosts(model, cluster, 8, 2, 1, *both)") == []
