"""Sizes of models, of published ones and of those that a `config.json` describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distca.cost.model_config import read_model_size
from distca.cost.model_sizes import MODELS, ModelSize

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
QWEN = LLAMA | {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 36,
}
QWEN_MOE = QWEN | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
}
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
GEMMA = {
    "model_type": "gemma3",
    "text_config": LLAMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 60,
        "hidden_size": 5376,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21504,
        "vocab_size": 262208,
        "sliding_window": 1024,
    },
}
SCOUT = {
    "model_type": "llama4",
    "text_config": LLAMA
    | {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "head_dim": 128,
        "intermediate_size": 8192,
        "vocab_size": 202048,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192,
    },
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 60,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}


def read(folder: Path, config: Any, **given: int) -> ModelSize:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_size(folder, given)


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA, "llama-8b"),
        (QWEN, "qwen3-8b"),
        # A window that the file has and does not use.
        (QWEN | {"sliding_window": 4096}, "qwen3-8b"),
        (QWEN_MOE, "qwen3-30b-a3b"),
        (MIXTRAL, "mixtral-8x7b"),
        (GPT_OSS, "gpt-oss-120b-like"),
        ({**GPT_OSS, "layer_types": None}, "gpt-oss-120b-like"),
        (GEMMA, "gemma3-27b-like"),
        (SCOUT, "llama4-scout-like"),
        (DEEPSEEK, "deepseek-v3-like"),
    ],
)
def test_a_configuration_is_the_preset_of_its_model(tmp_path: Path, config, preset: str) -> None:
    assert read(tmp_path, config) == MODELS[preset]
    assert read_model_size(tmp_path / "config.json") == MODELS[preset]


def test_windows_of_all_layers_of_some_and_of_none(tmp_path: Path) -> None:
    found = read(tmp_path, MISTRAL)
    assert (found.window_left, found.window_attn_skip_freq) == (4095, None)
    assert read(tmp_path, MISTRAL | {"sliding_window": None}).sees_all
    full = MISTRAL | {"layer_types": ["full_attention"] * 32}
    assert read(tmp_path, full).sees_all
    used = QWEN | {"sliding_window": 4096, "use_sliding_window": True}
    assert read(tmp_path, used).sees_all
    assert read(tmp_path, used | {"max_window_layers": 0}).window_left == 4095
    with pytest.raises(ValueError, match="not every Nth one"):
        read(tmp_path, used | {"max_window_layers": 20})
    with pytest.raises(ValueError, match="linear_attention cannot be described"):
        read(tmp_path, MISTRAL | {"layer_types": ["linear_attention"] * 32})


def test_given_sizes_win_and_stand_in_for_what_is_missing(tmp_path: Path) -> None:
    without = {name: value for name, value in LLAMA.items() if name != "vocab_size"}
    with pytest.raises(ValueError, match=r"vocab_size is missing: .*, or give --vocab-size"):
        read(tmp_path, without)
    found = read(tmp_path, without, vocab_size=1000, layers=4)
    assert (found.vocab_size, found.layers) == (1000, 4)
    one_head_each = {n: v for n, v in LLAMA.items() if n != "num_key_value_heads"}
    assert read(tmp_path, one_head_each).kv_heads == 32
    with pytest.raises(ValueError, match="head_dim is missing"):
        read(tmp_path, {n: v for n, v in QWEN.items() if n != "head_dim"})


def test_dense_layers_among_experts_are_told_or_refused(tmp_path: Path, caplog) -> None:
    read(tmp_path, DEEPSEEK | {"first_k_dense_replace": 3})
    assert "3 of 60 layers are dense: they count as layers with experts" in caplog.text
    with pytest.raises(ValueError, match="decoder_sparse_step is 2"):
        read(tmp_path, QWEN_MOE | {"decoder_sparse_step": 2})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds no configuration"),
        ("{}", "of type None are not known"),
        (json.dumps(LLAMA | {"model_type": "mamba"}), "of type 'mamba' are not known"),
        (json.dumps(LLAMA | {"num_hidden_layers": 0}), "num_hidden_layers is 0: it must be"),
        (json.dumps(LLAMA | {"hidden_size": "4096"}), "hidden_size is '4096': it must be"),
        (json.dumps(LLAMA | {"hidden_size": True}), "hidden_size is True: it must be"),
        (json.dumps(MIXTRAL | {"num_experts_per_tok": 9}), "cannot use 9 of 8 experts"),
        (json.dumps(MISTRAL | {"layer_types": "x"}), "layer_types is not a list"),
    ],
)
def test_what_describes_no_model_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_model_size(tmp_path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist: give a model's folder"):
        read_model_size(tmp_path)


@pytest.mark.parametrize(
    ("name", "billions"),
    # Of the models' cards; those of Llama 3.2 count the shared embedding once.
    [
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("llama-3.1-405b", 405.9),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
    ],
)
def test_presets_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    model = MODELS[name]
    ends = 1 if name.startswith("llama-3.2") else 2
    found = model.layers * model.total_layer_parameters + ends * model.vocabulary_parameters
    assert found == pytest.approx(billions * 1e9, rel=0.002)
