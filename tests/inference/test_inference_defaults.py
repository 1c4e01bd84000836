"""Settings that nobody gives, and those of a checkpoint that change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distca.inference.config import CacheConfig, ParallelConfig
from distca.inference.defaults import configure
from distca.inference.models import read_model
from support.small_models import save_small_model

NEUTRAL = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
}
"""Numbers with which transformers generates as without them; earlier versions wrote them all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model("llama", tmp_path_factory.mktemp("models"))


def test_a_setting_has_one_default(folder: Path) -> None:
    """Whether an engine is configured by `configure` or by the classes of its configuration."""
    config = configure(read_model(str(folder), torch.float32))
    assert (config.cache, config.parallel) == (CacheConfig(), ParallelConfig())


def test_a_generation_config_that_changes_nothing_is_applied(folder: Path, caplog) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(NEUTRAL))
    read_model(str(folder), torch.float32)
    assert caplog.text == ""
    for name, value in NEUTRAL.items():
        caplog.clear()
        file.write_text(json.dumps(NEUTRAL | {name: value + 1}))
        read_model(str(folder), torch.float32)
        assert caplog.text.endswith(f"generation_config.json: not applied: {name}\n")
