"""NeMo Automodel's recipe with DistCA: its losses and gradients are one process's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.automodel_loop import STEPS, train
from support.trainer_loops import check_steps, texts, write_model

pytest.importorskip("nemo_automodel", reason="NeMo Automodel is not installed")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_and_gradients_are_one_processs(
    ranks: Any, tmp_path: Path, micro_batches: int
) -> None:
    model, data = write_model(tmp_path / "model"), tmp_path / "texts.jsonl"
    given = [{"question": each[:20], "answer": each[20:] or "none"} for each in texts(40)]
    data.write_text("".join(json.dumps(each) + "\n" for each in given))
    paths = str(model), str(data), str(tmp_path / "output")
    check_steps(model, ranks.run(train, *paths, micro_batches, world_size=2), STEPS)
