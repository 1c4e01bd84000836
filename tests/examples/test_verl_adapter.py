"""verl's FSDP engine with DistCA, against verl's own in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.trainer_loops import write_model
from support.verl_engine import TOKENS, step

pytest.importorskip("verl", reason="verl is not installed")
pytest.importorskip("ray", reason="verl's engines need ray, which is not installed")

RANKS = 2


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_losses_and_gradients_are_one_processs(
    ranks: Any, tmp_path: Path, micro_batches: int
) -> None:
    model = str(write_model(tmp_path / "model"))
    (expected,) = ranks.run(step, model, False, RANKS, micro_batches, world_size=1)
    found = ranks.run(step, model, True, RANKS, micro_batches, world_size=RANKS)
    for name in ("log_probs", "entropy"):
        together = torch.stack([each for rank in found for each in getattr(rank, name)])
        torch.testing.assert_close(together, torch.stack(getattr(expected, name)))
    for rank in found:
        assert rank.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-6)
        assert rank.gradients.keys() == expected.gradients.keys()
        for name, each in expected.gradients.items():
            apart = (rank.gradients[name] - each).norm() / each.norm().clamp_min(1e-12)
            assert float(apart) < 5e-6, name
        if micro_batches == 1:
            # Responses to one prompt share its tokens.
            assert sum(rank.tokens) < 0.6 * TOKENS
