"""Rotary embeddings of Hugging Face's configurations as flags of `pretrain_gpt.py`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3's scaling of rotary angles as megatron-core has it; only the factor can be chosen."""

LATENT_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
    "truncate": True,
}
"""YaRN with multi-latent attention as megatron-core has it, where no flag chooses these."""

_MOST_BASE = 1e15
"""Greatest base. Above 2**53, floating point does not tell whole numbers apart."""

LOCAL_ROTARY_BASE = 10000.0
"""Rotary base of Gemma 3's layers with a window."""


def check_whole(config: Any) -> None:
    """Checks that a model of a family which turns whole keys has no other rotary embedding.

    Raises:
        ValueError: the configuration has a part, which transformers does not apply.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in rope.values() if isinstance(each, dict)]
    found = [each.get("partial_rotary_factor") for each in (rope, *nested)]
    found.append(getattr(config, "partial_rotary_factor", None))
    for part in found:
        if part not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor in config.json is {part!r}, which transformers does not "
                f"apply to {config.model_type}: only models without it are converted"
            )


def rope_parameters(config: Any) -> dict[str, Any]:
    """Returns a configuration's rotary embedding, with its base and type.

    Raises:
        ValueError: layers have several.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if any(isinstance(each, dict) for each in rope.values()):
        raise ValueError(f"rotary embeddings for each kind of layer are not converted: {rope}")
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    rope.setdefault("rope_type", rope.get("type") or "default")
    return rope


def main_rope_parameters(config: Any) -> dict[str, Any]:
    """Returns a configuration's rotary embedding, of its layers without a window if others differ.

    Raises:
        ValueError: layers have several, and not as Gemma 3's.
    """
    return rope_parameters(SimpleNamespace(rope_parameters=_by_kind(config)["full_attention"]))


def _by_kind(config: Any) -> dict[str, dict[str, Any]]:
    """Returns the rotary embeddings of the two kinds of layers.

    Raises:
        ValueError: layers have several, and not as Gemma 3's.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if {*rope} == {"full_attention", "sliding_attention"}:
        for kind, each in rope.items():
            if not isinstance(each, dict):
                raise ValueError(
                    f"{kind} of rope_parameters in config.json is {each!r}: give its rope_theta"
                )
        return dict(rope)
    whole = rope_parameters(config)
    return {"full_attention": whole, "sliding_attention": whole}


def two_base_rotary_flags(config: Any) -> list[str]:
    """Returns the flags of Gemma 3's rotary embeddings; its layers know the base of windows.

    Raises:
        ValueError: Megatron-LM has none for them, or layers with a window have another embedding.
    """
    kinds = _by_kind(config)
    local, rope = kinds["sliding_attention"], kinds["full_attention"]
    wanted = {"rope_theta": LOCAL_ROTARY_BASE, "rope_type": "default"}
    if other := _others(local, wanted):
        raise ValueError(f"rotary embedding of layers with a window with {other}: only {wanted}")
    words, kind = _base_flags(rope), rope["rope_type"]
    if kind == "default":
        return words
    factor = _number(rope, "factor")
    if kind != "linear" or factor != int(factor):
        raise ValueError(
            f"rotary scaling of type {kind!r} by {factor} is not converted with two rotary bases, "
            "only linear by a whole number"
        )
    return [*words, "--rotary-seq-len-interpolation-factor", str(int(factor))]


def rotary_flags(config: Any) -> list[str]:
    """Returns the flags of a rotary embedding of whole keys.

    Raises:
        ValueError: Megatron-LM has none for it.
    """
    rope = rope_parameters(config)
    kind, words = rope["rope_type"], _base_flags(rope)
    if rope.get("partial_rotary_factor") not in (None, 1):
        words += ["--rotary-percent", str(_number(rope, "partial_rotary_factor"))]
    if kind == "default":
        return words
    if kind == "llama3":
        if other := _others(rope, LLAMA3_ROPE):
            raise ValueError(f"rotary scaling with {other} is not in megatron-core: {LLAMA3_ROPE}")
        return [*words, "--use-rope-scaling", "--rope-scaling-factor", str(_number(rope, "factor"))]
    if kind == "yarn":
        return _yarn_flags(rope, config.max_position_embeddings)
    raise ValueError(f"rotary scaling of type {kind!r} is not converted, only llama3 and yarn")


def latent_rotary_flags(config: Any) -> list[str]:
    """Returns the flags of the rotary embedding of multi-latent attention.

    Raises:
        ValueError: Megatron-LM has none for it.
    """
    rope = rope_parameters(config)
    words, kind = [*_base_flags(rope), "--rope-type"], rope["rope_type"]
    if kind == "default":
        return [*words, "rope"]
    if kind != "yarn":
        raise ValueError(
            f"rotary scaling of type {kind!r} is not converted with multi-latent attention, only "
            "yarn"
        )
    needed: list[Any] = [rope.get("factor"), rope.get("mscale"), rope.get("mscale_all_dim")]
    # Without the two, or with 0, transformers has factors of its own.
    if not all(needed) or rope.get("attention_factor") or _others(LATENT_YARN | rope, LATENT_YARN):
        raise ValueError(
            f"rotary scaling by yarn with {rope} is not in megatron-core, which has {LATENT_YARN} "
            "and no attention_factor, and needs factor, mscale and mscale_all_dim other than 0"
        )
    factor, mscale, of_all = (
        str(_number(rope, name)) for name in ("factor", "mscale", "mscale_all_dim")
    )
    words += ["yarn", "--rotary-scaling-factor", factor]
    return [*words, "--mscale", mscale, "--mscale-all-dim", of_all]


def _others(rope: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Returns values that are not as they must be."""
    return {name: rope.get(name) for name, value in known.items() if rope.get(name) != value}


def _yarn_flags(rope: dict[str, Any], positions: int) -> list[str]:
    """Returns the flags of YaRN's scaling of rotary angles.

    Raises:
        ValueError: megatron-core has no such scaling.
    """
    if rope.get("attention_factor") or rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"rotary scaling by yarn with {rope} is not in megatron-core, which has neither "
            "attention_factor nor partial_rotary_factor"
        )
    original = rope.get("original_max_position_embeddings") or positions
    # What is null or 0 is as transformers has it.
    given = {"factor": positions / original} | {name: each for name, each in rope.items() if each}
    words = _base_flags(rope)
    words[words.index("rope")] = "yarn"
    words += ["--rotary-scaling-factor", str(_number(given, "factor"))]
    words += ["--yarn-original-max-position-embeddings", str(original)]
    words += ["--yarn-beta-fast", str(_number({"beta_fast": 32} | given, "beta_fast"))]
    words += ["--yarn-beta-slow", str(_number({"beta_slow": 1} | given, "beta_slow"))]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        words += ["--mscale", str(_number(rope, "mscale"))]
        words += ["--mscale-all-dim", str(_number(rope, "mscale_all_dim"))]
    if not rope.get("truncate", True):
        words.append("--no-yarn-correction-range-round-to-int")
    return words


def _base_flags(rope: dict[str, Any]) -> list[str]:
    """Returns the flags of a rotary embedding's base.

    Raises:
        ValueError: it is missing, or no whole number, or too large for one.
    """
    base = _number(rope, "rope_theta")
    if base > _MOST_BASE:
        raise ValueError(
            f"rope_theta of the rotary embedding in config.json is {base}: only bases of at most "
            f"{_MOST_BASE:g} are converted"
        )
    if base != int(base):
        raise ValueError(f"rope_theta {base} is not a whole number, which --rotary-base must be")
    return ["--position-embedding-type", "rope", "--rotary-base", str(int(base))]


def _number(rope: dict[str, Any], name: str) -> float:
    """Returns a number of a rotary embedding.

    Raises:
        ValueError: it is none, or not above 0.
    """
    value = rope.get(name)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(
            f"{name} of the rotary embedding in config.json is {value!r}: give a number above 0"
        )
    return float(value)  # type: ignore[arg-type]
