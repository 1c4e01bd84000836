"""Mistakes in a benchmark's command line: each is one line, before any work."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks.arguments import Parser

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OWN = {"remake", "compare_losses", "compare_speeds"}
"""Commands with checks of their own; nodes without our packages run the last one."""
MISTAKES = [
    ("links.transports", "--processes 0", "--processes 0: give at least 2"),
    ("links.transports", "--rounds 0", "--rounds 0: give at least 1"),
    ("plans.schedulers", "--output OUT --published NOWHERE", "the folder has no document_lengths_"),
    ("plans.schedulers", "--output OUT --models gpt", "argument --models: invalid choice: 'gpt'"),
    ("plans.schedulers", "--output FILE", "--output FILE: this is a file: give a folder"),
    ("plans.hybrid_cp", "--output OUT --published NOWHERE", "the folder has no document_lengths_"),
    ("plans.mirrored_placement", "--output OUT --batches 0", "--batches 0: give at least 1"),
    ("kernels.host_cost", "--output FILE/x", "--output FILE/x: FILE is a file"),
    ("kernels.host_cost", "--scheduler x", "argument --scheduler: invalid choice: 'x'"),
    ("kernels.attention", "--output OUT --tokens 0", "--tokens 0: give at least 1"),
    ("kernels.attention", "--output OUT --shards 8 -1", "--shards -1: give at least 1"),
    ("kernels.layer", "--output OUT --servers 0", "--servers 0: give at least 1"),
    ("kernels.device_copy", "--rounds 0", "--rounds 0: give at least 1"),
    ("kernels.fused_rows", "--tokens 0", "--tokens 0: give at least 1"),
    ("serving.balanced_prompts", "--output OUT --gpus 0", "--gpus 0: give at least 1"),
    ("serving.balanced_prompts", "--output OUT --published FILE", "the folder has no document_"),
    ("serving.cdsp_ablations", "--output OUT --requests 0", "--requests 0: give at least 1"),
    ("serving.cdsp_capacity", "--output OUT --seeds -1", "--seeds -1: give at least 0"),
    ("serving.connector_cost", "--output OUT --starts 0", "--starts 0: give at least 1"),
    ("serving.prefill_trace", "--output OUT --busy 0 1", "--busy 0.0: give more than 0"),
    ("serving.prefill_trace", "--output OUT --trace 6", "--trace 6: --busy has 5 shares"),
    ("training.more_ranks", "--output OUT --tolerances -1", "--tolerances -1.0: give at least 0"),
    ("training.rollouts", "--output OUT --mixes x", "argument --mixes: invalid choice: 'x'"),
    ("training.throughput", "--schedulers tiles --rounds 0", "--rounds 0: give at least 1"),
    ("training.throughput", "--distca-backward keep --peak-tflops -1", "give more than 0"),
    ("cluster.paper", "table4 --output OUT --batches 0", "--batches 0: give at least 1"),
    ("cluster.beside_peers", "--output OUT --drawn 0", "--drawn 0: give at least 1"),
    ("cluster.shared_prompts", "--output OUT --sizes 8", "argument --sizes: invalid choice: 8"),
    ("cluster.pooling_by_time", "--output OUT --published FILE", "the folder has no document_"),
    ("cluster.validate_simulator", "--output OUT --profile NOWHERE", "there is no such file"),
]


@pytest.mark.parametrize(("command", "flags", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    command: str, flags: str, message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    if command.startswith("training."):
        pytest.importorskip("megatron")
    (tmp_path / "FILE").write_text("")
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"benchmarks.{command}")
    monkeypatch.setattr(sys, "argv", [command, *flags.split()])
    with pytest.raises(SystemExit) as ended:
        module.main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    (line,) = told.err.replace(f"{tmp_path}/", "").splitlines()
    assert line.startswith(f"{command}: ")
    assert message in line
    assert not (tmp_path / "OUT").exists()


def test_every_command_has_this_parser() -> None:
    for path in sorted(BENCHMARKS.rglob("*.py")):
        text = path.read_text()
        if path.stem not in OWN | {"arguments"}:
            assert "ArgumentParser(" not in text, path
            assert ("Parser(" in text) == ("add_argument(" in text), path


def test_what_is_in_range_is_taken(tmp_path: Path) -> None:
    parser = Parser("A benchmark.\n\nMore.", {"tolerances": 0})
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.1])
    parser.add_argument("--rate", type=float)
    given = ["--output", str(tmp_path / "new" / "one"), "--tolerances", "0", "1", "--rate", "0.5"]
    found = parser.parse_args(given)
    assert (found.seed, found.tolerances, found.rate) == (0, [0.0, 1.0], 0.5)
    assert not (tmp_path / "new").exists()
    assert parser.description == "A benchmark."
