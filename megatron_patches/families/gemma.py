"""Gemma 2 and 3, whose layers are those of `megatron_patches.model.gemma`."""

from __future__ import annotations

from typing import Any, ClassVar

from mbridge.models import LLaMABridge

from megatron_patches.families.described import Windowed
from megatron_patches.families.rotary import two_base_rotary_flags


class Gemma2(Windowed, LLaMABridge):
    """Gemma 2, which mbridge has not: a Llama with norms behind attention and MLP."""

    reads_layer_types: ClassVar = True
    supported: ClassVar = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attn_logit_softcapping": (50.0,),
        "final_logit_softcapping": (30.0,),
        "use_bidirectional_attention": (False, None),
    }
    _ATTENTION_MAPPING: ClassVar = {
        **LLaMABridge._ATTENTION_MAPPING,
        "self_attention.post_layernorm.weight": [
            "model.layers.{layer_number}.post_attention_layernorm.weight"
        ],
    }
    _MLP_MAPPING: ClassVar = {
        **LLaMABridge._MLP_MAPPING,
        "mlp.linear_fc1.layer_norm_weight": [
            "model.layers.{layer_number}.pre_feedforward_layernorm.weight"
        ],
        "mlp.post_layernorm.weight": [
            "model.layers.{layer_number}.post_feedforward_layernorm.weight"
        ],
    }

    def layers(self) -> str:
        return self._of_scale("GEMMA2")

    def _of_scale(self, name: str) -> str:
        """Returns which of a family's two layers these are, by the factor of their scores.

        Raises:
            ValueError: they are neither.
        """
        config = self.hf_config
        by_hidden_size = config.hidden_size / config.num_attention_heads
        scalar = config.query_pre_attn_scalar
        if scalar == config.head_dim:
            return name
        if scalar == by_hidden_size:
            return f"{name}_27B"
        raise ValueError(
            f"query_pre_attn_scalar in config.json is {scalar}: of {config.model_type} only "
            f"models with head_dim ({config.head_dim}) or hidden_size / num_attention_heads "
            f"({by_hidden_size:g}) are converted"
        )


class Gemma3(Gemma2):
    """Gemma 3's language models, which mbridge has with another version's layers alone."""

    supported: ClassVar = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    }

    def mends(self) -> dict[str, Any]:
        return super().mends() | {"qk_layernorm": True}

    def layers(self) -> str:
        return self._of_scale("GEMMA3")

    def rotary_flags(self) -> list[str]:
        return two_base_rotary_flags(self.hf_config)
