"""ms-swift's trainer with DistCA: its losses and gradients are one process's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.pretraining import run_script
from support.trainer_loops import check_steps, texts, write_model

pytest.importorskip("swift", reason="ms-swift is not installed")

STEPS = 2


@pytest.mark.parametrize(("micro_batches", "prompts"), [(1, True), (2, False)])
def test_losses_and_gradients_are_one_processs(
    tmp_path: Path, micro_batches: int, prompts: bool
) -> None:
    """Of chats, and of texts without a prompt, whose first tokens are trained, too."""
    model, data = write_model(tmp_path / "model"), tmp_path / "texts.jsonl"
    given = [{"user": each[:20], "assistant": each[20:] or "none"} for each in texts(40)]
    if not prompts:
        given = [{"assistant": each} for each in texts(40)]
    lines = [{"messages": [{"role": r, "content": c} for r, c in each.items()]} for each in given]
    data.write_text("".join(json.dumps(each) + "\n" for each in lines))
    arguments = [str(model), str(data), str(tmp_path), str(micro_batches), str(prompts)]
    code, printed = run_script("tests/support/ms_swift_loop.py", 2, arguments)
    assert code == 0, printed[-3000:]
    files = [tmp_path / f"rank{rank}.pt" for rank in range(2)]
    check_steps(model, [torch.load(each, weights_only=False) for each in files], STEPS)
