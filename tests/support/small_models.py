"""Small models of transformers with random weights, one of each family that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 260
WINDOW = 24

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "phi3": ("Phi3Config", {"sliding_window": None, "pad_token_id": 0, "eos_token_id": 1}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
            # So small that it matters.
            "attn_logit_softcapping": 0.5,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}

_SEES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MULTIMODAL: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3Config", "gemma3_text", {}, {"mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3Config", "mistral", {"model_type": "pixtral"}, {"image_token_index": 2}),
    "llava": (
        "LlavaConfig",
        "llama",
        {"model_type": "clip_vision_model", "projection_dim": 32},
        {"image_token_index": 2},
    ),
    "internvl": (
        "InternVLConfig",
        "qwen2",
        {"image_size": [28, 28], "patch_size": [14, 14]},
        {"image_token_id": 2},
    ),
}
"""Multimodal models: configuration, family of the language part, of the vision part, others."""


def save_multimodal_model(kind: str, folder: Path, **changes: Any) -> Path:
    """Writes a multimodal model as transformers does, and returns its folder.

    Args:
        kind: its `model_type`.
        folder: where its folder is made.
        changes: other values of the language part's configuration.
    """
    import transformers

    name, family, vision, special = MULTIMODAL[kind]
    text_name, text = FAMILIES[family]
    language = getattr(transformers, text_name)(**_SIZES | text | changes)
    config = getattr(transformers, name)(
        text_config=language.to_dict(), vision_config=_SEES | vision, **special
    )
    return _save(transformers.AutoModelForImageTextToText, config, folder / kind)


def save_small_model(family: str, folder: Path, **changes: Any) -> Path:
    """Writes a model of a family, and returns its folder.

    Args:
        family: its `model_type`.
        folder: where its folder is made.
        changes: other values of the configuration.
    """
    import transformers

    name, special = FAMILIES[family]
    config = getattr(transformers, name)(**_SIZES | special | changes)
    return _save(transformers.AutoModelForCausalLM, config, folder / family)


def _save(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(1)
    model = kind.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 or name.endswith(("bias", "sinks")):
                # Large enough that tokens differ, and small enough that float32 stays exact.
                weight.normal_(0, 0.08)
    model.save_pretrained(folder)
    return folder


def spoil(folder: Path, name: str, value: float, row: int | None = None) -> None:
    """Overwrites weights of a saved model.

    Args:
        folder: folder of the model.
        name: name of the parameter.
        value: value of all its weights.
        row: row that is overwritten; None: all are.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name][slice(None) if row is None else row] = value
    save_file(weights, path, {"format": "pt"})
