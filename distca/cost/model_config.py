"""Reads a model's sizes from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distca.cost.model_sizes import Experts, Latents, ModelSize
from distca.json_files import read_text

logger = logging.getLogger(__name__)

CONFIG = "config.json"

_SIZES = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
"""Fields of `ModelSize` and their names in a `config.json`."""

_TEXT_PARTS = ("gemma3", "llama4", "mistral3")
"""Multimodal families, whose language model has a configuration of its own, `text_config`."""
_WINDOWS_BY_LAYER = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
"""Families where every Nth layer sees all, and N."""
_WINDOWS_IF_USED = ("qwen2", "qwen3", "qwen3_moe")
"""Families that have a window only with `use_sliding_window`."""
_LATENTS = ("deepseek_v2", "deepseek_v3")
_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text", *_LATENTS)
_FAMILIES = ("llama", "mistral", "phi3", "gemma2", "gemma3_text", "qwen2", "qwen3", *_EXPERTS)
_HEADS_FILL_WIDTH = ("llama", "mistral", "mixtral", "phi3", "qwen2")
"""Families whose heads have `hidden_size / num_attention_heads` elements without `head_dim`."""
_FULL = "full_attention"


_OF_ATTENTION = ("heads", "kv_heads", "head_dim")
"""Sizes that attention has."""


def read_model_size(
    path: Path, given: Mapping[str, int] | None = None, attention_only: bool = False
) -> ModelSize:
    """Reads the sizes of a language model.

    Dense layers at the beginning of a model with experts count as layers with experts, which is
    logged.

    Args:
        path: folder with a `config.json`, or that file.
        given: fields of `ModelSize` that win over the file's.
        attention_only: read heads, latents and masks; other sizes are 0, or 1 layer, and experts
            are None.

    Raises:
        ValueError: the file is missing or damaged, lacks a size, or describes a model whose layers
            `ModelSize` cannot express.
    """
    file = path / CONFIG if path.is_dir() else path
    text = read_text(file, "give a model's folder, or its config.json")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no configuration of a model")
    reader = _Reader(file, config, _OF_ATTENTION if attention_only else (*_SIZES,))
    return reader.size(dict(given or {}))


class _Reader:
    """The configuration of a language model.

    Args:
        file: where it comes from, for messages.
        config: its content; of a multimodal model the part of its language model is read.
        fields: fields of `ModelSize` that are read.
    """

    def __init__(self, file: Path, config: dict[str, Any], fields: Sequence[str]) -> None:
        self._file, self._fields = file, fields
        if config.get("model_type") in _TEXT_PARTS and isinstance(config.get("text_config"), dict):
            config = {"model_type": "mistral"} | config["text_config"]
        self._config = config
        self._family = config.get("model_type")
        if self._family not in _FAMILIES:
            raise ValueError(
                f"{file}: the sizes of a model of type {self._family!r} are not known: leave "
                f"--model out and give them as flags, or choose from {', '.join(_FAMILIES)}"
            )

    def size(self, given: dict[str, int]) -> ModelSize:
        """Returns the sizes, where `given` fields win."""
        sizes = {"layers": 1, "hidden_size": 0, "ffn_hidden_size": 0, "vocab_size": 0}
        for field in self._fields:
            sizes[field] = given[field] if field in given else self._size(field, given)
        every_size = "layers" in self._fields
        experts = None
        if self._family in _EXPERTS and every_size:
            experts, sizes["ffn_hidden_size"] = self._experts(sizes["layers"], given)
        latents = self._latents() if self._family in _LATENTS else None
        if latents is not None:
            sizes["kv_heads"] = given.get("kv_heads", sizes["heads"])
            rotated = self._number("qk_nope_head_dim") + latents.rotated_dim
            sizes["head_dim"] = given.get("head_dim", rotated)
        window, chunk, period = self._masks(sizes["layers"] if every_size else None)
        return ModelSize(
            **sizes,
            experts=experts,
            latents=latents,
            window_left=window,
            attention_chunk_size=chunk,
            window_attn_skip_freq=period,
        )

    def _size(self, field: str, given: Mapping[str, int]) -> int:
        """Reads a size, or what the family has without it."""
        name = _SIZES[field]
        absent = self._config.get(name) is None
        if absent and field == "kv_heads" and self._family in ("llama", "phi3"):
            return self._heads(given)
        if field == "head_dim" and self._family in _LATENTS:
            return self._number("qk_nope_head_dim")
        divides = absent and field == "head_dim" and self._family in _HEADS_FILL_WIDTH
        if divides and ("hidden_size" in self._fields or "hidden_size" in self._config):
            return self._number("hidden_size") // self._heads(given)
        return self._number(name)

    def _heads(self, given: Mapping[str, int]) -> int:
        """Reads the number of query heads, where flags may give what the file lacks."""
        if self._config.get("num_attention_heads") is None and "heads" in given:
            return given["heads"]
        return self._number("num_attention_heads")

    def _number(self, name: str, least: int = 1) -> int:
        value = self._config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            what = "is missing" if value is None else f"is {value!r}"
            flags = [f"--{each.replace('_', '-')}" for each in self._fields if _SIZES[each] == name]
            raise ValueError(
                f"{self._file}: {name} {what}: it must be a whole number of at least {least}"
                + "".join(f", or give {flag}" for flag in flags)
            )
        return value

    def _experts(self, layers: int, given: dict[str, int]) -> tuple[Experts, int]:
        """Returns the routed experts, and the width of the MLP that all tokens use."""
        number = next(
            (n for n in ("num_experts", "n_routed_experts") if n in self._config),
            "num_local_experts",
        )
        own = "moe_intermediate_size"
        width = self._number(own if own in self._config else "intermediate_size")
        experts = Experts(self._number(number), self._number("num_experts_per_tok"), width)
        if self._family == "llama4_text":
            shared = width
        else:
            shared = width * (self._config.get("n_shared_experts") or 0)
        for name in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"):
            if self._config.get(name, 1) != 1:
                raise ValueError(
                    f"{self._file}: {name} is {self._config[name]!r}: layers without experts among "
                    "those with them cannot be described"
                )
        dense = self._config.get("first_k_dense_replace") or 0
        dense += len(self._config.get("mlp_only_layers") or [])
        if dense:
            logger.warning(
                "%s: %d of %d layers are dense: they count as layers with experts",
                self._file,
                dense,
                layers,
            )
        return experts, given.get("ffn_hidden_size", shared)

    def _latents(self) -> Latents:
        rank = self._config.get("q_lora_rank")
        return Latents(
            self._number("kv_lora_rank"),
            self._number("qk_rope_head_dim"),
            self._number("v_head_dim"),
            None if rank is None else self._number("q_lora_rank"),
        )

    def _masks(self, layers: int | None) -> tuple[int | None, int | None, int | None]:
        """Returns `window_left`, `attention_chunk_size` and `window_attn_skip_freq`."""
        window = chunk = None
        if self._family == "llama4_text":
            chunk = self._config.get("attention_chunk_size")
        elif self._family not in _WINDOWS_IF_USED or self._config.get("use_sliding_window"):
            window = self._config.get("sliding_window")
        if window is None and chunk is None:
            return None, None, None
        if window is not None:
            # transformers counts the query's own token, too.
            window = self._number("sliding_window") - 1
        if chunk is not None:
            chunk = self._number("attention_chunk_size")
        listed = self._config.get("layer_types") is not None
        # The number of layers says nothing where each is listed.
        kinds = self._kinds((layers or self._number("num_hidden_layers")) if not listed else 0)
        if _FULL not in kinds:
            return window, chunk, None
        if set(kinds) == {_FULL}:
            return None, None, None
        period = kinds.index(_FULL) + 1
        if period < 2 or any(
            (kind == _FULL) != ((number + 1) % period == 0) for number, kind in enumerate(kinds)
        ):
            raise ValueError(
                f"{self._file}: layers that see all are not every Nth one, which is all that can "
                "be described"
            )
        return window, chunk, period

    def _kinds(self, layers: int) -> Sequence[str]:
        """Returns what each layer sees."""
        kinds = self._config.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
                raise ValueError(f"{self._file}: layer_types is not a list of names")
            unknown = {*kinds} - {_FULL, "sliding_attention", "chunked_attention"}
            if unknown:
                raise ValueError(
                    f"{self._file}: layers with {', '.join(sorted(unknown))} cannot be described"
                )
            return kinds
        if self._family in _WINDOWS_IF_USED:
            first = self._config.get("max_window_layers") or 0
            return [_FULL if number < first else "sliding_attention" for number in range(layers)]
        every = _WINDOWS_BY_LAYER.get(str(self._family))
        if self._family == "gemma3_text":
            every = self._config.get("sliding_window_pattern") or every
        if self._family == "llama4_text":
            every = self._config.get("no_rope_layer_interval") or 4
        return [
            _FULL if every and (number + 1) % every == 0 else "sliding_attention"
            for number in range(layers)
        ]
