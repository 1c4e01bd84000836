"""Models of transformers with `attn_implementation="distca"` against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from support.library_loops import FAMILIES, Steps, losses_by_dtype, train_alone, train_together

pytest.importorskip("transformers")


@cache
def alone(family: str, accumulated: int, labelled: bool) -> Steps:
    return train_alone(family, accumulated, labelled)


def check(found: list[Steps], expected: Steps, one_mask: bool = True) -> None:
    for rank in found:
        assert rank.bytes_counted or not one_mask
        assert rank.losses == pytest.approx(expected.losses, rel=1e-6)
        for mine, theirs in zip(rank.gradients, expected.gradients, strict=True):
            apart = {
                name: float((mine[name] - each).norm() / each.norm().clamp_min(1e-12))
                for name, each in theirs.items()
            }
            assert max(apart.values()) < 5e-6, apart


@pytest.mark.parametrize(
    ("family", "world_size", "scheduler"),
    [("llama", 1, "tiles"), ("llama", 4, "tiles"), ("qwen3", 2, "greedy")],
)
def test_losses_and_gradients_are_one_processs(
    ranks: Any, family: str, world_size: int, scheduler: str
) -> None:
    found = ranks.run(train_together, family, scheduler, world_size=world_size)
    check(found, alone(family, 1, False))
    for step in zip(*(rank.tokens for rank in found), strict=True):
        assert max(step) - min(step) <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"accumulated": 2},
        {"labelled": True},
        {"checkpointing": True},
        pytest.param({"compiled": True}, marks=pytest.mark.full),
        {"own_documents": True},
        {"accumulated": 2, "checkpointing": True, "labelled": True},
    ],
    ids=str,
)
def test_ways_to_train(ranks: Any, options: dict[str, Any]) -> None:
    given = {"scheduler": "tiles", "accumulated": 1, "labelled": False, "checkpointing": False}
    given |= {"compiled": False, "own_documents": False} | options
    found = ranks.run(train_together, "llama", *given.values(), world_size=2, timeout=400)
    check(found, alone("llama", given["accumulated"], given["labelled"]))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "qwen3")])
def test_windows_soft_caps_and_sinks(ranks: Any, family: str) -> None:
    found = ranks.run(train_together, family, world_size=2)
    # Layers with two masks have two plans, whose bytes `test_library_attention.py` counts.
    check(found, alone(family, 1, False), one_mask=family in ("mistral", "gpt2"))


def test_autocast(ranks: Any) -> None:
    for found in ranks.run(losses_by_dtype, world_size=2):
        (loss, gradient), (mixed, of_mixed) = found[torch.float32], found[torch.bfloat16]
        assert mixed == pytest.approx(loss, rel=1e-3)
        assert float((of_mixed - gradient).norm() / gradient.norm()) < 0.05
