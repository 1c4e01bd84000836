"""Families of models: mbridge's description of each, with what it lacks.

Each class is mbridge's own for a `model_type`. Here it describes the model by a namespace of
megatron-core's names instead of megatron-core's configuration, which needs a GPU's packages, and
whose fields differ between versions. Only what mbridge says wrongly or not at all is added.
"""

from __future__ import annotations

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

_NO_BIASES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


_GROUPED_EXPERTS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "norm_topk_prob": (True,),
}


class OlderConfig:
    """A configuration of transformers 5 by the names of transformers 4, which mbridge reads."""

    def __init__(self, config: Any) -> None:
        rope = rope_parameters(config)
        heads = config.num_attention_heads
        self._config = config
        self._changed = {
            "rope_theta": rope["rope_theta"],
            # Scaled angles are described by `rotary_flags` of the classes below.
            "rope_scaling": None,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        }

    def __getattr__(self, name: str) -> Any:
        changed = self.__dict__["_changed"]
        return changed[name] if name in changed else getattr(self.__dict__["_config"], name)

    def __contains__(self, name: str) -> bool:
        return name in self._changed or hasattr(self._config, name)


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


class Described:
    """What the classes here add to mbridge's.

    Attributes:
        supported: values of `config.json` that are converted, by name. A name that a configuration
            lacks is passed over.
    """

    TransformerConfigClass = SimpleNamespace
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {"hidden_act": ("silu",)}
    hf_config: Any

    def _build_config(self) -> SimpleNamespace:
        described: SimpleNamespace = super()._build_config()  # type: ignore[misc]
        vars(described).update(self.mends())
        return described

    def _adjust_mapping_for_shared_weights(self) -> None:
        """Does nothing: mbridge would change the tables of all models of the class."""

    def mends(self) -> dict[str, Any]:
        """Returns what mbridge says wrongly or not at all, by megatron-core's names."""
        return {}

    def rotary_flags(self) -> list[str]:
        """Returns the flags of the rotary embedding.

        Raises:
            ValueError: Megatron-LM has none for it.
        """
        rope = rope_parameters(self.hf_config)
        kind, words = rope["rope_type"], base_flags(rope)
        if (turned := rope.get("partial_rotary_factor", 1.0)) != 1:
            words += ["--rotary-percent", str(turned)]
        if kind == "default":
            return words
        if kind == "llama3":
            other = {name: rope[name] for name, known in LLAMA3_ROPE.items() if rope[name] != known}
            if other:
                raise ValueError(
                    f"rotary scaling with {other} is not in megatron-core: {LLAMA3_ROPE}"
                )
            return [*words, "--use-rope-scaling", "--rope-scaling-factor", str(rope["factor"])]
        raise ValueError(f"rotary scaling of type {kind!r} is not converted, only llama3")


LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3's scaling of rotary angles as megatron-core has it; only the factor can be chosen."""


def base_flags(rope: dict[str, Any]) -> list[str]:
    """Returns the flags of a rotary embedding's base.

    Raises:
        ValueError: it is no whole number.
    """
    base = float(rope["rope_theta"])
    if base != int(base):
        raise ValueError(f"rope_theta {base} is no whole number, which --rotary-base must be")
    return ["--position-embedding-type", "rope", "--rotary-base", str(int(base))]


class Llama(Described, LLaMABridge):
    """Llama 2 and 3."""

    supported: ClassVar = _NO_BIASES


class Mistral(Described, LLaMABridge):
    """Mistral, which mbridge has not: a Llama with windows."""

    supported: ClassVar = _NO_BIASES

    def mends(self) -> dict[str, Any]:
        return windows(self.hf_config)


class Qwen2(Described, Qwen2Bridge):
    """Qwen2 and 2.5."""

    def mends(self) -> dict[str, Any]:
        return windows(self.hf_config)


class Qwen3(Described, Qwen3Bridge):
    """Qwen3's dense models."""

    supported: ClassVar = _NO_BIASES

    def mends(self) -> dict[str, Any]:
        return windows(self.hf_config)


class Mixtral(Described, MixtralBridge):
    """Mixtral."""

    def mends(self) -> dict[str, Any]:
        # mbridge has the softmax of all experts' scores, not of the chosen ones'.
        return windows(self.hf_config) | {"moe_router_pre_softmax": False}


class Qwen2Moe(Described, Qwen2MoEBridge):
    """Qwen1.5-MoE and Qwen2-MoE."""

    # Some layers may have no experts.
    _MLP_MAPPING: ClassVar = {**Qwen2MoEBridge._MLP_MAPPING, **Qwen2Bridge._MLP_MAPPING}

    def mends(self) -> dict[str, Any]:
        config = self.hf_config
        return {
            **windows(config),
            **_qwen_experts(config),
            "add_qkv_bias": config.qkv_bias,
            "moe_shared_expert_gate": True,
        }


class Qwen3Moe(Described, Qwen3MoEBridge):
    """Qwen3's models with experts."""

    supported: ClassVar = _NO_BIASES
    _MLP_MAPPING: ClassVar = Qwen2Moe._MLP_MAPPING

    def mends(self) -> dict[str, Any]:
        return windows(self.hf_config) | _qwen_experts(self.hf_config)


class Glm4Moe(Described, GLM4MoEBridge):
    """GLM-4.5 and 4.6, without their layers for multi-token prediction."""

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
        if config.q_lora_rank is None:
            raise ValueError(
                "q_lora_rank in config.json is null: megatron-core's local layers norm latents of "
                "keys only where queries have latents, too"
            )
        # Keys have a head size of their own.
        return _grouped_experts(config) | {"kv_channels": config.v_head_dim}

    def rotary_flags(self) -> list[str]:
        rope = rope_parameters(self.hf_config)
        words = [*base_flags(rope), "--rope-type"]
        if rope["rope_type"] == "default":
            return [*words, "rope"]
        if rope["rope_type"] != "yarn":
            raise ValueError(
                f"rotary scaling of type {rope['rope_type']!r} is not converted with multi-latent "
                "attention, only yarn"
            )
        other = {
            name: value
            for name, value in rope.items()
            if name in LATENT_YARN and value != LATENT_YARN[name]
        }
        needed = {rope.get("mscale"), rope.get("mscale_all_dim")}
        if other or None in needed or rope.get("attention_factor") is not None:
            raise ValueError(
                f"rotary scaling by yarn with {rope} is not in megatron-core, which has "
                f"{LATENT_YARN}, and needs mscale and mscale_all_dim"
            )
        return [
            *words,
            *("yarn", "--rotary-scaling-factor", str(float(rope["factor"]))),
            *("--mscale", str(float(rope["mscale"]))),
            *("--mscale-all-dim", str(float(rope["mscale_all_dim"]))),
        ]


LATENT_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
"""What megatron-core's flags cannot change of YaRN with multi-latent attention."""


def _grouped_experts(config: Any) -> dict[str, Any]:
    """Returns how a router chooses experts of some groups by sigmoids.

    Raises:
        ValueError: megatron-core chooses otherwise.
    """
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
    groups = {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return found | groups


def windows(config: Any) -> dict[str, Any]:
    """Returns the attention windows of a model's layers, by megatron-core's names.

    A query sees itself and the window's other tokens before it.
    """
    window = getattr(config, "sliding_window", None)
    if not window:
        return {}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if not any(slides):
        return {}
    found: dict[str, Any] = {"window_size": (window - 1, 0)}
    return found if all(slides) else found | {"window_attn_skip_freq": slides}


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
    "deepseek_v3": DeepseekV3,
}
"""Families that are converted, by `model_type`."""

MISSING = {
    "gemma2": "it has soft caps of scores and logits",
    "gemma3_text": "it has four norms in a layer",
}
"""Why others are not, by `model_type`."""


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
        lacks = f" ({MISSING[kind]})" if kind in MISSING else ""
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
    return family(OlderConfig(config), dtype=dtype, parallel_states=ParallelStates())  # type: ignore[call-arg]
