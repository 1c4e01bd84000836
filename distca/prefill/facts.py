"""What an engine and its prefill ranks must agree on, so that keys and values mean the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distca.prefill.messages import PROTOCOL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_HEADER = 1 << 16
"""Bytes of a file of weights that count: names and shapes come first, then values."""


NOT_QUANTIZED = "none"
"""Weights have the dtype of rows."""

_OF_LENGTH = ("longrope", "dynamic")
"""Rotary embeddings whose frequencies depend on the longest sequence, and on whose code it is."""


def model_facts(
    config: PreTrainedConfig, folder: str, dtype: str, frequencies: str, quantization: str
) -> dict[str, str]:
    """Says what keys and values of a model depend on, and how they are sent.

    Args:
        config: configuration of transformers; that of the language part if there are others.
        folder: folder of the model.
        dtype: name of the dtype of keys and values.
        frequencies: how rotary frequencies that depend on the longest sequence are chosen.
        quantization: how weights are quantized as they are computed with; `NOT_QUANTIZED`: not.

    Returns:
        Values by names that a user understands.
    """
    heads, rotary = int(config.num_attention_heads), _rotary(config)
    sizes: dict[str, object] = {
        "family": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "head size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocabulary": config.vocab_size,
        "sliding window": getattr(config, "sliding_window", None),
        "kinds of layers": getattr(config, "layer_types", None),
        "rotary embedding": rotary,
    }
    # Kinds of layers may have their own.
    kinds = (rotary, *(each for each in rotary.values() if isinstance(each, dict)))
    if any(each.get("rope_type") in _OF_LENGTH for each in kinds):
        sizes["rotary frequencies"] = frequencies
    told = {name: json.dumps(value, sort_keys=True) for name, value in sizes.items()}
    return {
        "protocol": str(PROTOCOL),
        **told,
        "dtype": dtype,
        "quantization of weights": quantization,
        "weights": _weights_digest(Path(folder)),
    }


def frequencies_of_vllm(max_model_len: int) -> str:
    """How vLLM chooses rotary frequencies that depend on the longest sequence."""
    return f"vLLM's for --max-model-len {max_model_len}"


def model_folder(name: str, revision: str | None = None, cache_dir: str | None = None) -> str:
    """Returns the folder of a model that is loaded.

    Args:
        name: a folder, or a name on the Hugging Face hub.
        revision: revision on the hub; None: the latest.
        cache_dir: folder of what was downloaded; None: the hub's own.

    Raises:
        ValueError: there is none, so nobody can say whether both sides have the same weights.
    """
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder: str = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
        return folder
    except LocalEntryNotFoundError:
        raise ValueError(
            f"the weights of {name} cannot be compared with the other side's: give the folder of "
            "the model"
        ) from None


def disagreement(
    theirs: Mapping[str, str], ours: Mapping[str, str], only_told: bool = False
) -> str | None:
    """Names the first fact on which two sides differ, with both values; None: they agree.

    Args:
        theirs: facts of the engine.
        ours: facts of the prefill ranks.
        only_told: whether the engine may leave facts out.
    """
    for name, value in ours.items():
        if only_told and name not in theirs:
            continue
        if theirs.get(name) != value:
            given = theirs.get(name, "none")
            return f"{name}: the engine has {given}, and the prefill ranks have {value}"
    return None


def are_weights_there(folder: str) -> bool:
    """Whether a folder has all files of weights, so that their digest means something."""
    found = {each.name for end in _WEIGHTS for each in Path(folder).glob(end)}
    named: set[str] = set()
    for index in Path(folder).glob("*.index.json"):
        try:
            named |= set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            # Whoever loads the model says what is wrong with it.
            return False
    return bool(found) and named <= found


def _rotary(config: PreTrainedConfig) -> dict[str, object]:
    """Numbers of rotary embeddings, wherever a version of transformers keeps them."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta = getattr(config, "rope_theta", None)
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return {name: value for name, value in rope.items() if value is not None}


def _weights_digest(folder: Path) -> str:
    """A digest of the files of weights: their names, sizes, and how each begins and ends."""
    digest = hashlib.sha256()
    for path in sorted({each for end in _WEIGHTS for each in folder.glob(end)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEADER))
            file.seek(max(size - _HEADER, 0))
            digest.update(file.read(_HEADER))
    return digest.hexdigest()[:16]
