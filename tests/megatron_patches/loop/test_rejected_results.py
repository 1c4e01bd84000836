"""`--result-rejected-tracker-filename`: an iteration that failed twice on a rank is skipped."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_patches.loop.preflight import check_same_skips
from support.pretraining import FLAGS, LOSS, TOKENIZER, run_script
from support.whole_runs import write_documents

FLAG = "--result-rejected-tracker-filename"


@pytest.mark.parametrize("flags", ["", "--distca"])
def test_what_failed_twice_is_skipped(flags: str, tmp_path: Path) -> None:
    data = write_documents(tmp_path / "documents", [500, 470, 130] * 20)
    # In a folder that is not there yet.
    tracker, saved = tmp_path / "kept" / "rejected", str(tmp_path / "saved")

    def train(poison: str) -> tuple[int, str]:
        given = [*TOKENIZER, *FLAGS, "--train-iters", "5", "--data-path", data, *flags.split()]
        given += ["--save", saved, "--save-interval", "2", "--load", saved]
        given += ["--rerun-mode", "disabled", FLAG, str(tracker)]
        return run_script("tests/support/poisoned.py", 2, [poison, *given])

    for times in (1, 2):
        code, output = train("gradient@4@1")
        assert code == 1, output[-3000:]
        lines = tracker.read_text().splitlines()
        assert len(lines) == times
        assert all("rank=1 iteration=4 status=" in line for line in lines)
    code, output = train("nothing@0@0")
    assert code == 0, output[-3000:]
    # From the checkpoint of iteration 2 on.
    assert [int(number) for number, _ in LOSS.findall(output)] == [3, 5]


@pytest.mark.parametrize("flags", ["", "--distca"])
def test_a_file_that_cannot_be_written(flags: str, tmp_path: Path) -> None:
    data = write_documents(tmp_path / "documents", [500, 470, 130])
    given = [*TOKENIZER, *FLAGS, "--train-iters", "4", "--data-path", data, *flags.split()]
    code, output = run_script("pretrain_gpt.py", 2, [*given, FLAG, str(tmp_path)])
    assert code == 2
    (error,) = re.findall(r"error: (.*)", output)
    assert error == f"{FLAG} {tmp_path} is a folder: give the name of a file"
    assert "Traceback" not in output


def skips_seen(of_ranks: list[list[int]]) -> str:
    args = Namespace(
        iterations_to_skip=of_ranks[dist.get_rank()],
        result_rejected_tracker_filename="rejected",
    )
    try:
        check_same_skips(args)
    except ValueError as error:
        return str(error)
    return "none"


def test_ranks_that_see_different_files(ranks) -> None:
    assert ranks.run(skips_seen, [[7, 4], [4, 7, 7]], world_size=2) == ["none", "none"]
    for different in ([[4], []], [[], [4]]):
        problems = ranks.run(skips_seen, different, world_size=2)
        assert len(set(problems)) == 1
        assert problems[0].startswith(f"{FLAG} rejected makes ranks skip different iterations: ")
