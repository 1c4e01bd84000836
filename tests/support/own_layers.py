"""Layers as a user gives them by `--spec`."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_patches.model.features import Features
from megatron_patches.model.gemma import layer_spec


class DampedLayer(TransformerLayer):
    """A layer that adds half of what Megatron's adds."""

    def forward(self, *args: Any, **named: Any) -> Any:
        before = args[0] if args else named["hidden_states"]
        after, context = super().forward(*args, **named)
        return before + (after - before) / 2, context


class CappedAttention(DotProductAttention):
    """Core attention of another function."""


_LAYER = get_gpt_layer_local_spec(normalization="RMSNorm")
DAMPED = ModuleSpec(module=DampedLayer, submodules=_LAYER.submodules)
CAPPED = copy.deepcopy(_LAYER)
CAPPED.submodules.self_attention.submodules.core_attention = CappedAttention
# Caps so small that they matter with small weights.
SMALL_CAPS = layer_spec(Features(score_cap=0.02, logit_cap=0.2), qk_norms=False)
WITHOUT_ATTENTION = copy.deepcopy(_LAYER)
WITHOUT_ATTENTION.submodules.self_attention = ModuleSpec(module=TransformerLayer)
