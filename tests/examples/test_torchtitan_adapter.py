"""torchtitan's trainer with DistCA: its losses and gradients are one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.torchtitan_loop import STEPS, expected, train

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

RANKS = 2


@pytest.mark.parametrize("accumulated", [1, 2])
def test_losses_and_gradients_are_one_processs(
    ranks: Any, tmp_path: Path, accumulated: int
) -> None:
    found = ranks.run(train, str(tmp_path), accumulated, world_size=RANKS)
    for rank in found:
        assert len(rank) == STEPS
        for number, step in enumerate(rank):
            alone = expected(number, step.weights, RANKS, accumulated)
            assert step.loss == pytest.approx(alone.loss, rel=1e-6)
            assert step.gradients
            for name, each in step.gradients.items():
                other = alone.gradients[name.replace("_checkpoint_wrapped_module.", "")]
                apart = float((each - other).norm() / other.norm().clamp_min(1e-12))
                assert apart < 5e-6, name
    for step in zip(*found, strict=True):
        for mine in zip(*(each.tokens for each in step), strict=True):
            assert max(mine) - min(mine) <= 1
