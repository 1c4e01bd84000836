"""VeOmni's trainer with DistCA: its losses and gradients are one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.trainer_loops import check_steps, write_model, write_texts
from support.veomni_loop import SAMPLES, STEPS, train

pytest.importorskip("veomni", reason="VeOmni is not installed")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_losses_and_gradients_are_one_processs(
    ranks: Any, tmp_path: Path, micro_batches: int
) -> None:
    model = write_model(tmp_path / "model")
    data = write_texts(tmp_path / "texts.jsonl", SAMPLES)
    given = str(model), str(data), str(tmp_path / "output"), micro_batches
    check_steps(model, ranks.run(train, *given, world_size=2), STEPS)
