"""Sizes of models with experts, by whatever name their configuration has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distca.cost.model_sizes import Experts
from distca.cost.volume import AttentionShape
from distca.inference.models import model_size


@pytest.mark.parametrize(
    ("name", "width"),
    [("MixtralConfig", 96), ("Qwen3MoeConfig", 32), ("GptOssConfig", 96), ("DeepseekV3Config", 32)],
)
def test_experts_are_found(name: str, width: int) -> None:
    import transformers

    config: Any = getattr(transformers, name)(intermediate_size=96, num_experts_per_tok=2)
    config.moe_intermediate_size = 32 if width == 32 else None
    shape = AttentionShape(config.num_attention_heads, 1, 64)
    model: Any = SimpleNamespace(
        config=config, windows=(None,), kv_heads=1, shape=shape, vocab_size=260
    )
    counts = {"MixtralConfig": 8, "Qwen3MoeConfig": 128, "GptOssConfig": 128}
    assert model_size(model).experts == Experts(counts.get(name, 256), 2, width)
