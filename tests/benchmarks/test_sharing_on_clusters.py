"""The page of shared prompts on clusters: a small job, and rows of ways that do not fit."""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

from benchmarks.cluster import shared_prompts
from benchmarks.cluster.shared_prompts import Row, least_gb, line
from distca.commands.main import main


def test_a_page_of_a_small_job(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(shared_prompts, "SIZES", ((8192, 8, 1024),))
    monkeypatch.setattr(shared_prompts, "GROUPS", 8)
    monkeypatch.setattr(shared_prompts, "MODEL", "llama-3.2-1b")
    flags = ["--gpus", "8", "--sizes", "1", "--systems", "plain", "--output", str(tmp_path)]
    with patch.object(sys, "argv", ["shared_prompts", *flags]):
        shared_prompts.main()
    (job,) = json.loads((tmp_path / "shared_prompts.json").read_text())
    ours, whole, apart = (row["seconds"][0] for row in job["rows"])
    parts = job["rows"][0]["parts"]
    # The same job by the command, with all that it charges by default.
    command = "simulate rollouts --prompt 8192 --responses 8 --response 1024 --groups 8 --gpus 8"
    command += " --model llama-3.2-1b --cluster dgx-h200 --batches 1 --systems plain --json"
    capsys.readouterr()
    assert main(command.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["seconds"][0] for row in printed] == [ours, whole, apart]
    cells = (tmp_path / "shared_prompts.md").read_text().splitlines()[6].split(" | ")
    assert cells[:2] == ["| 8K x 8 x 1K", "8"]
    assert cells[2].startswith(f"{ours:.2f} (TP")
    assert cells[3].startswith(f"{apart / ours:.2f} (plain Megatron")
    assert cells[4].startswith(f"{whole / ours:.2f} (TP")
    assert cells[5] == f"{(parts['linear'] + parts['attention']) / ours:.2f}"
    assert "% core attention, " in cells[6]

    # Another run takes the job from there.
    monkeypatch.setattr(shared_prompts, "simulate", None)
    flags = ["--output", str(tmp_path / "again"), "--only-earlier", "--sizes", "1"]
    with patch.object(sys, "argv", ["shared_prompts", *flags, "--earlier", str(tmp_path)]):
        shared_prompts.main()
    page = (tmp_path / "again" / "shared_prompts.md").read_text().splitlines()
    assert page[6].split(" | ") == cells
    assert "--earlier DIR ...`: simulated" in page[2]
    assert page[8].startswith(f"Jobs by the run that simulated them: 1 on {job['run']}.")


def test_ways_that_do_not_fit_say_why() -> None:
    """Rollouts one by one are shorter, and may fit."""
    peer = Row("one by one: WLB-LLM, ideal", "TP4", (9.5,), 140.0, 0.0)
    for rows, said in (([], "none fits"), ([peer], "none; they take 9.50 s (WLB-LLM, ideal)")):
        cells = line((65_536, 16, 8_192), 8, rows)
        assert cells[:2] == ["64K x 16 x 8K", "8"]
        needed = least_gb((65_536, 16, 8_192), 8)
        assert needed > 145
        assert f"at least {needed:.0f} GB of a GPU, which has 145" in cells[2]
        assert cells[3:] == [said, "none fits", "", ""]
