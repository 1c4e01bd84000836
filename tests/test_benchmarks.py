"""The benchmarks that are meant for GPUs, and those of whole steps, in a small form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(script: str, output: Path, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *flags, "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_rate_of_short_shards(tmp_path) -> None:
    sizes = ["--tokens", "512", "--keys", "1024", "--shards", "8", "512", "--repeats", "3"]
    printed = run("kernels", tmp_path, "--device", "cpu", *sizes)
    rows = json.loads((tmp_path / "kernels_cpu.json").read_text())["rows"]
    assert [row["shard_length"] for row in rows] == [8, 512]
    assert max(row["of_best"] for row in rows) == 1
    assert min(row["backward_tflops"] for row in rows) > 0
    assert (tmp_path / "kernels_cpu.png").stat().st_size > 1000
    assert "| 512 |" in printed


def test_one_layer_on_virtual_servers(tmp_path) -> None:
    """All ways compute the same; the benchmark itself holds bytes against the plans'."""
    sizes = ["--servers", "3", "--seq-length", "512", "--hidden-size", "64", "--heads", "4"]
    run("layer", tmp_path, "--device", "cpu", *sizes, "--repeats", "1")
    rows = {
        row["way"]: row for row in json.loads((tmp_path / "layer_cpu.json").read_text())["rows"]
    }
    assert set(rows) == {"packed", "whole", "ping-pong, one stream", "ping-pong"}
    sums = [row["sum_of_outputs"] for row in rows.values()]
    assert sums == pytest.approx([sums[0]] * 4, rel=1e-5)
    assert rows["ping-pong"]["bytes"] > 0
    assert rows["whole"]["max_over_mean"] <= rows["packed"]["max_over_mean"]


def test_step_time_and_bytes_by_tolerance(tmp_path) -> None:
    sizes = ["--processes", "2", "--seq-length", "512", "--hidden-size", "128", "--layers", "1"]
    sizes += ["--batches", "1", "--rounds", "1", "--servers", "4", "--tokens", "4096"]
    run("tolerance", tmp_path, *sizes, "--tolerances", "0", "0.5")
    found = json.loads((tmp_path / "tolerance.json").read_text())
    for scheduler in ("greedy", "tiles"):
        strict, loose = found["processes"][scheduler]
        assert strict["megabytes"] >= loose["megabytes"]
        assert min(strict["seconds"], loose["seconds"]) > 0
        strict, loose = found["model"][scheduler]
        assert strict["megabytes"] >= loose["megabytes"]
        assert strict["compute_ms"] <= loose["compute_ms"]
    assert (tmp_path / "tolerance.png").stat().st_size > 1000
