"""The page of server pools on real processes: bytes are those of the simulator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distca.commands import profile as profiling

ROOT = Path(__file__).parents[2]


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{script}.py", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_simulated_bytes_are_those_sent(tmp_path: Path) -> None:
    heads = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
    profile = tmp_path / "profile.json"
    profiling.main([*heads, "--max-length", "256", "--output", str(profile)])
    sizes = "--processes 4 --micro-batches 2 --seq-length 512 --num-layers 1 --hidden-size 64"
    sizes += " --num-attention-heads 4 --num-query-groups 2 --modes whole --schedulers tiles"
    variants = ["", "--distca-pool-size 2", "--distca-head-parallel-size 2"]
    steps = ["--mixes", "long-tail", "--batches", "1", "--rounds", "1", "--variants", *variants]
    found = run("training/throughput", *sizes.split(), *steps, "--output", str(tmp_path))
    assert found.returncode == 0, found.stderr[-2000:]
    given = ["--steps", str(tmp_path / "throughput.json"), "--profile", str(profile)]
    found = run("cluster/validate_pools", *given, "--output", str(tmp_path))
    assert found.returncode == 0, found.stderr[-2000:]
    rows = json.loads((tmp_path / "pools.json").read_text())["rows"]
    ours = [row for row in rows if row["way"] != "plain"]
    assert [row["way"] for row in ours] == ["tiles", *(f"tiles {each}" for each in variants[1:])]
    for row in ours:
        assert row["sent"] == row["simulated"] > 0, row
        assert row["predicted"] > 0
        assert row["measured"] > 0
    pooled, one_pool = ours[1], ours[0]
    assert pooled["sent"] < one_pool["sent"]
    assert "Simulated bytes are those sent in 3 of 3 rows" in (tmp_path / "pools.md").read_text()


def test_steps_with_a_core_each_are_refused(tmp_path: Path) -> None:
    steps = tmp_path / "throughput.json"
    steps.write_text(json.dumps({"model": {}, "setting": {"processes": 2}}))
    given = ["--steps", str(steps), "--profile", str(steps), "--output", str(tmp_path)]
    found = run("cluster/validate_pools", *given)
    assert found.returncode == 2
    assert "had a core each: give --processes more" in found.stderr
