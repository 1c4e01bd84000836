"""Refuses values of a model's configuration that make its logits NaN or meaningless."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ABOVE_ZERO = (
    "rope_theta",
    "rope_local_base_freq",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
    "max_position_embeddings",
    "num_experts_per_tok",
)
_NOT_BELOW_ZERO = ("rms_norm_eps",)
_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
_MOST_LAYERS = 1000
"""More layers than any model has: an outline of them takes a second or two."""


def check_file(folder: Path) -> None:
    """Refuses a config.json that transformers' error does not explain, or takes very long for.

    Args:
        folder: folder of the model.

    Raises:
        ValueError: it is not an object of JSON, or its model has too few or too many layers or
            heads.
    """
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        # transformers says so.
        return
    if not isinstance(values, dict):
        raise ValueError(f"{folder}: config.json is no object of JSON, {{...}}: download it again")
    parts = [each for each in (values, values.get("text_config")) if isinstance(each, dict)]
    for name, value in ((name, part.get(name)) for part in parts for name in _COUNTS):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if value < 1:
            raise ValueError(f"{folder}: {name} in config.json is {value}: it must be above 0")
        if name == "num_hidden_layers" and value > _MOST_LAYERS:
            raise ValueError(
                f"{folder}: {name} in config.json is {value}: it must be at most {_MOST_LAYERS}"
            )


def check_values(config: PreTrainedConfig, path: str) -> None:
    """Refuses numbers that make no model: NaN, infinity, and those outside their ranges.

    Args:
        config: configuration of the language model.
        path: its folder, for the message.

    Raises:
        ValueError: there is such a number; the message names it.
    """
    values = config.to_dict()
    for name, value in _numbers(values):
        if name == "sliding_window" and values.get("use_sliding_window") is False:
            # Some families write 0 where no layer has a window.
            continue
        wanted = None
        if name in _ABOVE_ZERO and not value > 0:
            wanted = "above 0"
        elif name in _NOT_BELOW_ZERO and not value >= 0:
            wanted = "0 or more"
        elif not math.isfinite(value):
            wanted = "finite"
        if wanted is not None:
            raise ValueError(f"{path}: {name} in config.json is {value}: it must be {wanted}")
    experts = values.get("num_local_experts") or values.get("num_experts")
    if experts and (values.get("num_experts_per_tok") or 0) > experts:
        raise ValueError(
            f"{path}: num_experts_per_tok in config.json is {values['num_experts_per_tok']}, but "
            f"there are {experts} experts"
        )


def _numbers(values: dict[str, object]) -> Iterator[tuple[str, float]]:
    """Gives all numbers with their names, also those of rotary embeddings, which may be nested."""
    for name, value in values.items():
        if isinstance(value, dict) and (name.startswith("rope_") or "attention" in name):
            yield from _numbers(value)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int | float) and not isinstance(each, bool):
                yield name, each
