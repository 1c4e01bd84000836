"""Families of models: mbridge's description of each, with what it lacks.

Each class is mbridge's own for a `model_type`, or another's that is like it. Only what mbridge says
wrongly or not at all is added.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from mbridge.core.parallel_states import ParallelStates
from mbridge.models import (
    DeepseekV3Bridge,
    GLM4MoEBridge,
    LLaMABridge,
    MixtralBridge,
    Qwen2Bridge,
    Qwen2MoEBridge,
    Qwen3Bridge,
    Qwen3MoEBridge,
)
from megatron.core.activations import quick_gelu

from distca.checkpoints.stored_weights import StoredTensor
from megatron_patches.families.described import (
    Described,
    OlderConfig,
    Windowed,
    check_layer_types,
    windows,
)
from megatron_patches.families.gemma import Gemma2, Gemma3
from megatron_patches.families.rotary import check_whole, latent_rotary_flags

_NO_BIASES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


_GROUPED_EXPERTS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "norm_topk_prob": (True,),
}


LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents in transformers, whatever `rms_norm_eps` is."""


class Llama(Described, LLaMABridge):
    """Llama 2 and 3."""

    supported: ClassVar = _NO_BIASES


class Mistral(Windowed, LLaMABridge):
    """Mistral, which mbridge has not: a Llama with windows."""

    supported: ClassVar = _NO_BIASES


class Qwen2(Windowed, Qwen2Bridge):
    """Qwen2 and 2.5."""

    reads_layer_types: ClassVar = True


class Qwen3(Windowed, Qwen3Bridge):
    """Qwen3's dense models."""

    reads_layer_types: ClassVar = True
    supported: ClassVar = _NO_BIASES


class Mixtral(Windowed, MixtralBridge):
    """Mixtral."""

    def mends(self) -> dict[str, Any]:
        # mbridge has the softmax of all experts' scores, not of the chosen ones'.
        return super().mends() | {"moe_router_pre_softmax": False}


class Qwen2Moe(Windowed, Qwen2MoEBridge):
    """Qwen1.5-MoE and Qwen2-MoE."""

    reads_layer_types: ClassVar = True
    # Some layers may have no experts.
    _MLP_MAPPING: ClassVar = {**Qwen2MoEBridge._MLP_MAPPING, **Qwen2Bridge._MLP_MAPPING}

    def mends(self) -> dict[str, Any]:
        config = self.hf_config
        return {
            **super().mends(),
            **_qwen_experts(config),
            "add_qkv_bias": config.qkv_bias,
            "moe_shared_expert_gate": True,
        }


class Qwen3Moe(Windowed, Qwen3MoEBridge):
    """Qwen3's models with experts."""

    supported: ClassVar = _NO_BIASES
    _MLP_MAPPING: ClassVar = Qwen2Moe._MLP_MAPPING

    def mends(self) -> dict[str, Any]:
        return super().mends() | _qwen_experts(self.hf_config)


class Phi3(Windowed, LLaMABridge):
    """Phi-3 and 4, which mbridge has not: a Llama that keeps some weights in one tensor."""

    turns_part: ClassVar = True

    def sources(self, name: str) -> list[str]:
        found = super().sources(name)
        return found if len(found) == 1 else [_joined(found[0])]

    def _weight_to_mcore_format(self, name: str, weights: list[torch.Tensor]) -> torch.Tensor:
        if "linear_qkv.weight" in name:
            config = self.hf_config
            rows = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
            weights = [*torch.split(weights[0], [each * config.head_dim for each in rows])]
        elif "linear_fc1.weight" in name:
            weights = [*weights[0].chunk(2)]
        found: torch.Tensor = super()._weight_to_mcore_format(name, weights)
        return found

    def _weight_to_hf_format(
        self, name: str, weight: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        names, weights = super()._weight_to_hf_format(name, weight)
        if len(names) == 1:
            return names, weights
        return [_joined(names[0])], [torch.cat(weights)]


def _joined(first: str) -> str:
    """Returns the name of the tensor in which Phi-3 keeps some, by the first one's."""
    return first.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")


class GptOss(Windowed, Qwen2MoEBridge):
    """GPT-OSS in bfloat16, which mbridge has not."""

    reads_layer_types: ClassVar = True
    supported: ClassVar = {"hidden_act": ("silu",), "attention_bias": (True,)}
    _ATTENTION_MAPPING: ClassVar = {
        **Qwen2MoEBridge._ATTENTION_MAPPING,
        "self_attention.linear_proj.bias": ["model.layers.{layer_number}.self_attn.o_proj.bias"],
        "core_attention.softmax_offset": ["model.layers.{layer_number}.self_attn.sinks"],
    }
    _MLP_MAPPING: ClassVar = {
        "pre_mlp_layernorm": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
        "mlp.router.weight": ["model.layers.{layer_number}.mlp.router.weight"],
        "mlp.router.bias": ["model.layers.{layer_number}.mlp.router.bias"],
        "linear_fc1.weight": ["model.layers.{layer_number}.mlp.experts.gate_up_proj"],
        "linear_fc1.bias": ["model.layers.{layer_number}.mlp.experts.gate_up_proj_bias"],
        "linear_fc2.weight": ["model.layers.{layer_number}.mlp.experts.down_proj"],
        "linear_fc2.bias": ["model.layers.{layer_number}.mlp.experts.down_proj_bias"],
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Weights of a layer's experts until all are there, which are one tensor.
        self._experts: dict[str, dict[int, torch.Tensor]] = {}

    def _build_config(self) -> SimpleNamespace:
        config = self.hf_config
        return self._build_base_config(
            activation_func=quick_gelu,
            glu_linear_offset=1.0,
            activation_func_clamp_value=getattr(config, "swiglu_limit", 7.0),
            add_bias_linear=True,
            add_qkv_bias=True,
            softmax_type="learnable",
            num_moe_experts=config.num_local_experts,
            moe_router_topk=config.num_experts_per_tok,
            moe_router_load_balancing_type="none",
            moe_ffn_hidden_size=config.intermediate_size,
            moe_router_pre_softmax=False,
            **windows(config),
        )

    def read(self, name: str, tensor: StoredTensor) -> torch.Tensor:
        expert = _expert_of(name)
        return tensor[:] if expert is None else tensor[expert : expert + 1]

    def _weight_to_mcore_format(self, name: str, weights: list[torch.Tensor]) -> torch.Tensor:
        if _expert_of(name) is None:
            found: torch.Tensor = super()._weight_to_mcore_format(name, weights)
            return found
        # Inputs come first in transformers, and gates and what they let through take turns.
        weight = weights[0][0].T.to(self.dtype)
        return torch.cat([weight[::2], weight[1::2]]) if "linear_fc1" in name else weight

    def _weight_to_hf_format(
        self, name: str, weight: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        expert = _expert_of(name)
        if expert is None:
            names, weights = super()._weight_to_hf_format(name, weight)
            return names, weights
        if "linear_fc1" in name:
            weight = torch.stack(weight.chunk(2), 1).flatten(0, 1)
        (own,) = self.sources(name)
        found = self._experts.setdefault(own, {})
        found[expert] = weight.T
        if len(found) < self.config.num_moe_experts:
            return [], []
        del self._experts[own]
        return [own], [torch.stack([found[each] for each in sorted(found)])]


def _expert_of(name: str) -> int | None:
    """Returns the expert that a weight is of; None: of none."""
    found = re.search(r"\.mlp\.experts\.linear_fc[12]\.(?:weight|bias)(\d+)$", name)
    return None if found is None else int(found[1])


class Glm4Moe(Described, GLM4MoEBridge):
    """GLM-4.5 and 4.6, without their layers for multi-token prediction."""

    turns_part: ClassVar = True
    supported: ClassVar = _GROUPED_EXPERTS

    def mends(self) -> dict[str, Any]:
        config = self.hf_config
        return _grouped_experts(config) | {"add_qkv_bias": config.attention_bias}


class DeepseekV3(Described, DeepseekV3Bridge):
    """DeepSeek-V3 and R1, without their layer for multi-token prediction."""

    supported: ClassVar = {
        **_GROUPED_EXPERTS,
        "attention_bias": (False,),
        "rope_interleave": (True,),
    }

    def mends(self) -> dict[str, Any]:
        config = self.hf_config
        _check_latents(config)
        # Keys have a head size of their own.
        return _grouped_experts(config) | {"kv_channels": config.v_head_dim}

    def rotary_flags(self) -> list[str]:
        return latent_rotary_flags(self.hf_config)


class DeepseekV2(DeepseekV3):
    """DeepSeek-V2, which mbridge has not: V3's weights, and a softmax that judges experts."""

    supported: ClassVar = {
        **_NO_BIASES,
        "norm_topk_prob": (False, None),
        "topk_method": ("greedy", "group_limited_greedy"),
    }

    def mends(self) -> dict[str, Any]:
        config = self.hf_config
        _check_latents(config)
        found = {
            "kv_channels": config.v_head_dim,
            "moe_router_score_function": "softmax",
            "moe_router_enable_expert_bias": False,
            "mtp_num_layers": None,
        }
        if config.topk_method == "greedy":
            return found
        _check_groups(config, 1)
        if config.num_experts_per_tok // config.topk_group != 1:
            raise ValueError(
                f"num_experts_per_tok {config.num_experts_per_tok} and topk_group "
                f"{config.topk_group} in config.json: DeepSeek-V2 judges a group by its best "
                "expert, megatron-core by num_experts_per_tok / topk_group of them"
            )
        return found | _groups(config)


def _grouped_experts(config: Any) -> dict[str, Any]:
    """Returns how a router chooses experts of some groups by sigmoids.

    Raises:
        ValueError: megatron-core chooses otherwise.
    """
    # Transformers judges a group by its best two experts.
    _check_groups(config, 2)
    if config.num_experts_per_tok == 1:
        raise ValueError(
            "num_experts_per_tok in config.json is 1: megatron-core would not make the weights of "
            "experts add up to 1"
        )
    found = {
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size
        * config.n_shared_experts,
        "moe_router_dtype": "fp32",
    }
    if config.n_group == 1:
        return found
    if config.num_experts_per_tok // config.topk_group != 2:
        raise ValueError(
            f"num_experts_per_tok {config.num_experts_per_tok} and topk_group {config.topk_group} "
            "in config.json: transformers judges a group by its best two experts, megatron-core "
            "by num_experts_per_tok / topk_group of them"
        )
    return found | _groups(config)


def _check_latents(config: Any) -> None:
    """Checks what transformers' models with multi-latent attention have but one value for.

    Raises:
        ValueError: the configuration has another.
    """
    if config.rms_norm_eps != LATENT_EPSILON:
        raise ValueError(
            f"rms_norm_eps in config.json is {config.rms_norm_eps}: transformers norms latents "
            f"with {LATENT_EPSILON} all the same, and megatron-core has one value for all norms; "
            f"of {config.model_type} only models with {LATENT_EPSILON} are converted"
        )
    if config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"num_key_value_heads in config.json is {config.num_key_value_heads}: with "
            f"multi-latent attention it is num_attention_heads, {config.num_attention_heads}"
        )


def _check_groups(config: Any, judges: int) -> None:
    """Checks how many groups of experts there are, and how many are chosen.

    Args:
        config: the model's configuration.
        judges: experts of a group by which transformers judges it.

    Raises:
        ValueError: transformers could not choose.
    """
    experts, groups = config.n_routed_experts, config.n_group
    if not groups or groups < 1 or experts % groups or experts // groups < judges:
        raise ValueError(
            f"n_group in config.json is {groups}: give a number of groups that divides "
            f"n_routed_experts, {experts}, and leaves at least {judges} in each"
        )
    chosen = config.topk_group
    if not chosen or not 1 <= chosen <= groups:
        raise ValueError(
            f"topk_group in config.json is {chosen}: give a number from 1 to n_group, {groups}"
        )
    most = experts // groups * chosen
    if not config.num_experts_per_tok or not 1 <= config.num_experts_per_tok <= most:
        raise ValueError(
            f"num_experts_per_tok in config.json is {config.num_experts_per_tok}: give a number "
            f"from 1 to {most}, the experts of topk_group groups"
        )


def _groups(config: Any) -> dict[str, Any]:
    return {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}


def _qwen_experts(config: Any) -> dict[str, Any]:
    """Returns which layers have experts, and how their scores become weights."""
    layers = range(config.num_hidden_layers)
    has_experts = [
        int(layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0)
        for layer in layers
    ]
    return {
        "moe_layer_freq": has_experts,
        # The softmax of the chosen scores is that of all scores, made to add up to 1.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


BRIDGES: dict[str, type[Described]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "mixtral": Mixtral,
    "qwen2_moe": Qwen2Moe,
    "qwen3_moe": Qwen3Moe,
    "glm4_moe": Glm4Moe,
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
    "phi3": Phi3,
    "gpt_oss": GptOss,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
}
"""Families that are converted, by `model_type`."""

MISSING = {
    "gemma": "GELU gates",
}
"""What Megatron-LM has no flags for in other families, by `model_type`."""


def bridge_of(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Returns the bridge of a model.

    Args:
        config: transformers' configuration of the language model.
        dtype: data type of the weights that it makes.

    Raises:
        ValueError: the family is not converted, or the model has a feature that is not.
    """
    kind = config.model_type
    if kind not in BRIDGES:
        lacks = f" (Megatron-LM has no flags for {MISSING[kind]})" if kind in MISSING else ""
        raise ValueError(
            f"the model is of the family {kind}, which is not converted{lacks}: only these are: "
            f"{', '.join(BRIDGES)}"
        )
    family = BRIDGES[kind]
    for name, accepted in family.supported.items():
        value = getattr(config, name, accepted[0])
        if value not in accepted:
            wanted = " or ".join(map(repr, accepted))
            raise ValueError(
                f"{name} in config.json is {value!r}: of {kind} only models with {wanted} are "
                "converted"
            )
    check_layer_types(family, config)
    if not family.turns_part:
        check_whole(config)
    return family(OlderConfig(config), dtype=dtype, parallel_states=ParallelStates())  # type: ignore[call-arg]
