"""verl's batches on ranks that share prompts: its log-probabilities, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.verl_loop import shared_step, step_one_by_one

pytest.importorskip("transformers")
pytest.importorskip("verl", reason="verl is not installed")

RANKS = 2


def test_a_step_of_grpo_is_that_of_sequences_one_by_one(ranks: Any) -> None:
    expected = step_one_by_one(RANKS)
    for mine, other in zip(ranks.run(shared_step, world_size=RANKS), expected, strict=True):
        torch.testing.assert_close(mine.log_probabilities, other.log_probabilities)
        assert mine.loss == pytest.approx(other.loss, rel=3e-6, abs=3e-6)
        for name, each in other.gradients.items():
            apart = float((mine.gradients[name] - each).norm() / each.norm().clamp_min(1e-12))
            assert apart < 1e-5, name
        assert mine.tokens < 0.6 * other.tokens
