"""The page of launches and waits, from a made-up history of budgets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.kernels import launches

OLD = {"whole": {"launches": 9, "syncs": 4}}
NEW = {"whole": {"launches": 5, "syncs": 4}, "later": {"launches": 7, "syncs": 1}}


def commit(folder: Path, name: str, counts: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(counts))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], cwd=folder, check=True)
    subprocess.run([*git, "commit", "-qm", "counted"], cwd=folder, check=True)


def test_each_job_is_compared_with_its_first_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(launches, "ROOT", tmp_path)
    commit(tmp_path, launches.TRAINING, OLD)
    commit(tmp_path, launches.TRAINING, NEW)
    history = launches.versions(launches.TRAINING)
    assert [counts for _, counts in history] == [OLD, NEW]
    page = launches.training_table(history, NEW)
    assert "| whole | 9 → 5 | 4 → 4 |" in page
    assert "| later | 7 → 7 | 1 → 1 |" in page
    with pytest.raises(ValueError, match="no history"):
        launches.versions("nothing.json")


def test_models_have_a_row_for_each_number_of_ranks() -> None:
    kinds = dict.fromkeys(launches.KINDS, 6)
    before = {"1 ranks": {"llama": kinds | {"decode launches": 8}}}
    page = launches.answers_table([("a", before)], {"1 ranks": {"llama": kinds}})
    assert "| 1 | llama | 6 → 6 | 6 → 6 | 8 → 6 | 6 → 6 |" in page


def test_layers_are_compared_with_those_of_transformers() -> None:
    counts = {"transformers": 120, "1 rank": 54, "2 ranks": 69}
    history = [("a", {"llama": counts | {"1 rank": 123}})]
    page = launches.layers_table(history, {"llama": counts})
    assert "| llama | 40.0 | 41.0 → 18.0 | 0.45 | 23.0 → 23.0 | 0.57 |" in page


def test_schedule_calls_are_compared_with_an_earlier_simulator() -> None:
    now = {name: {launches.CALLS: before // 2} for name, before in launches.BEFORE.items()}
    page = launches.calls_table(now)
    assert "| ping-pong | 3607 | 1803 | 0.50 |" in page
    assert "| whole | 1871 | 935 | 0.50 |" in page
    # They have a table of their own.
    counts = {each: its | {"launches": 1, "syncs": 1} for each, its in now.items()}
    assert "ping-pong" not in launches.training_table([("a", counts)], counts)
