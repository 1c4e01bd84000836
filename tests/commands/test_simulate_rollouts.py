"""`distca simulate rollouts`."""

from __future__ import annotations

import json

import pytest

from distca.commands.main import main

SIZES = "--prompt 8192 --responses 8 --response 1024 --groups 8 --gpus 8 --cluster dgx-h200"
FLAGS = [*SIZES.split(), "--model", "llama-3.2-1b", "--systems", "plain", "cp-p2p"]
FLAGS += ["--tensor-model-parallel-sizes", "1", "--batches", "2"]


def test_it_says_what_sharing_gains(capsys) -> None:
    assert main(["simulate", "rollouts", *FLAGS]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("Share prompts: ")
    assert "times as fast as rollouts one by one with the fastest, " in first
    assert "times as fast as " in first.partition(";")[2]
    assert any(line.startswith("trees over all ranks (DistCA)") for line in table)
    assert main(["simulate", "rollouts", *FLAGS, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    # Parts of an iteration add up to it.
    for row in rows[:2]:
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"][0], rel=1e-6)
        assert row["parts"]["linear"] + row["parts"]["attention"] < row["seconds"][0]
    assert sum("% core attention, " in line for line in table) == 2
    seconds = {row["title"]: sum(row["seconds"]) for row in rows}
    apart = min(each for title, each in seconds.items() if title.startswith("one by one"))
    trees = (each for title, each in seconds.items() if not title.startswith("one by one"))
    gain = apart / min(trees)
    assert f"Share prompts: {gain:.3f} (" in first
    assert gain > 2


def test_short_prompts_are_not_shared(capsys) -> None:
    flags = [*FLAGS, "--prompt", "127", "--spread", "0", "--batches", "1", "--systems", "plain"]
    assert main(["simulate", "rollouts", *flags]) == 0
    first, sizes, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Nothing is shared, and so nothing gained: ")
    assert "73,664 tokens one by one, 73,664 as trees" in sizes
    assert main(["simulate", "rollouts", *flags, "--least", "127"]) == 0
    first, sizes, *_ = capsys.readouterr().out.splitlines()
    assert "hare prompts: " in first
    assert "73,664 tokens one by one, 66,552 as trees" in sizes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--responses", "0"], "--responses 0: give at least 1"),
        (["--spread", "-1"], "spread -1.0: give 0 to 3"),
        (["--model", "qwen3-30b-a3b"], "experts are not simulated"),
        (["--model", "gemma3-27b-like"], "windows or chunks"),
        (["--tensor-model-parallel-sizes", "3"], "no size of --tensor-model-parallel-sizes"),
        (["--batches", "0"], "--batches 0: give at least 1"),
        (["--gpus", "100"], "--gpus 100 are not whole nodes of 8: give a multiple"),
        (["--gpus", "1000000000"], "--gpus 1000000000: give at most 65536"),
        (["--prompt", "1000000000000"], "rollouts have more than 134,217,728 tokens"),
        (["--groups", "1000000000"], "8,000,000,000 rollouts: give at most 1,048,576"),
        (["--least", "0"], "--least 0: give at least 1"),
        (["--seed", "-1"], "--seed -1 must not be negative"),
        (["--tensor-model-parallel-sizes", "0"], "every size must be at least 1"),
    ],
)
def test_mistakes_are_refused(capsys, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "rollouts", *FLAGS, *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
