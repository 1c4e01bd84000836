"""A checkpoint is saved before the evaluation of its iteration, which tells how far it is."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megatron_patches.loop.checkpoint_folder import TRACKER
from support.pretraining import descendants, kill_all, run, start

FLAGS = ["--hidden-dropout", "0", "--eval-interval", "2", "--eval-iters", "1"]


def evaluations(output: str) -> dict[str, str]:
    found = re.findall(r"validation loss at (iteration \d+) \| lm loss value: (\S+)", output)
    return dict(found)


@pytest.mark.parametrize("distca", [[], ["--distca"]], ids=["plain", "distca"])
def test_each_evaluation_comes_after_its_checkpoint(corpus, tmp_path: Path, distca) -> None:
    """Of the last iteration, too; and a run that goes on evaluates as if it had not stopped."""
    flags = [*FLAGS, *distca, "--train-iters", "5", "--eval-interval", "1", "--save-interval", "2"]
    _, output = run(2, corpus, *flags, "--save", str(tmp_path))
    order = re.findall(
        r"successfully saved checkpoint from iteration +(\d)|validation loss at iteration (\d) \|",
        output,
    )
    events = [f"save {saved}" if saved else f"evaluate {at}" for saved, at in order]
    evaluated = [f"evaluate {i}" for i in range(1, 6)]
    assert events == [
        evaluated[0],
        "save 2",
        evaluated[1],
        evaluated[2],
        "save 4",
        evaluated[3],
        "save 5",
        evaluated[4],
    ]
    expected = evaluations(output)
    (tmp_path / TRACKER).write_text("2")
    _, output = run(2, corpus, *flags, "--load", str(tmp_path))
    found = evaluations(output)
    assert found == {f"iteration {i}": expected[f"iteration {i}"] for i in (3, 4, 5)}


def test_a_signal_ends_an_evaluation_between_two_batches(corpus, tmp_path: Path) -> None:
    flags = ["--distca", "--train-iters", "9", "--eval-interval", "1", "--eval-iters", "100000"]
    flags += ["--save", str(tmp_path), "--save-interval", "9", "--exit-signal-handler"]
    process = start(2, corpus, *flags)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if re.search(r"evaluated \d+ of 100000 batches", line):
                break
        for pid in descendants(process.pid):
            if "pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        kill_all(process)
    assert process.returncode == 0, output[-3000:]
    assert "exiting program after receiving SIGTERM" in output
    assert (tmp_path / TRACKER).read_text() == "1"
