"""Layers of `--spec`: the user's own, in which core attention alone is replaced.

Megatron-LM's script takes a spec by the module and the name that it has there. The layers may be of
any class that calls one core attention with its usual arguments.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any, TypeAlias

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

Spec: TypeAlias = ModuleSpec | TransformerBlockSubmodules


def given_spec(words: Sequence[str]) -> Spec:
    """Returns a copy of the spec that `--spec` names.

    Args:
        words: value of the flag: a module, and the name of a spec in it.

    Raises:
        ValueError: there is none, or it has core attention that cannot be replaced by ours.
    """
    flag = f"--spec {' '.join(words)}"
    if len(words) != 2:
        raise ValueError(f"{flag}: give a module, and the name of a spec in it")
    module, name = words
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{flag}: {error}") from error
    if not isinstance(found, Spec):
        raise ValueError(
            f"{flag}: it is of type {type(found).__name__}: give a ModuleSpec of layers or of a "
            "block, or TransformerBlockSubmodules"
        )
    found = copy.deepcopy(found)
    for layer in layers_of(found):
        _check_attention(layer, flag)
    return found


def layers_of(spec: Spec) -> list[ModuleSpec]:
    """Returns the specs of a spec's layers, each once."""
    if isinstance(spec, ModuleSpec):
        if isinstance(spec.module, type) and issubclass(spec.module, BaseTransformerLayer):
            return [spec]
        spec = spec.submodules
    layers = getattr(spec, "layer_specs", None) or []
    return list({id(each): each for each in layers}.values())


def block_of(spec: Spec, layers: int, norm: Any) -> TransformerBlockSubmodules:
    """Returns the submodules of a pipeline stage's block.

    Args:
        spec: spec of a layer or a block.
        layers: number of layers of the stage.
        norm: norm behind the last layer, where the spec does not say.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    if isinstance(spec.module, type) and issubclass(spec.module, TransformerBlock):
        found: TransformerBlockSubmodules = spec.submodules
        return found
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=norm)


def replace_core_attention(spec: Spec, core_attention: Any) -> None:
    """Puts another core attention into all layers of a spec, in place."""
    for layer in layers_of(spec):
        layer.submodules.self_attention.submodules.core_attention = core_attention


def _check_attention(layer: ModuleSpec, flag: str) -> None:
    """Checks that a layer's core attention is Megatron's.

    Raises:
        ValueError: it is another one, which computes something else than ours.
    """
    attention = getattr(layer.submodules, "self_attention", None)
    known = (SelfAttention, MLASelfAttention)
    if not isinstance(attention, ModuleSpec) or not (
        isinstance(attention.module, type) and issubclass(attention.module, known)
    ):
        raise ValueError(
            f"{flag}: DistCA replaces core attention of layers whose self_attention is Megatron's "
            f"SelfAttention, MLASelfAttention or a subclass, not {_name(attention)}"
        )
    inner = attention.submodules.core_attention
    kind = inner.module if isinstance(inner, ModuleSpec) else inner
    if kind is not DotProductAttention and _name(kind) != "TEDotProductAttention":
        raise ValueError(
            f"{flag}: its core attention is {_name(kind)}, for which DistCA would compute another "
            "function: give DotProductAttention or TEDotProductAttention"
        )


def _name(kind: Any) -> str:
    kind = kind.module if isinstance(kind, ModuleSpec) else kind
    return getattr(kind, "__name__", str(kind))
