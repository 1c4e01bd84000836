"""Small models beside those of the families that are served: multimodal and spoilt ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distca.inference.small_models import (
    FAMILIES,
    SIZES,
    VOCABULARY,
    WINDOW,
    save_model,
    save_small_model,
)

__all__ = [
    "FAMILIES",
    "MULTIMODAL",
    "VOCABULARY",
    "WINDOW",
    "save_multimodal_model",
    "save_small_model",
    "spoil",
]

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
    language = getattr(transformers, text_name)(**SIZES | text | changes)
    config = getattr(transformers, name)(
        text_config=language.to_dict(), vision_config=_SEES | vision, **special
    )
    return save_model(transformers.AutoModelForImageTextToText, config, folder / kind)


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
