"""Which of vLLM's models the prefill ranks run, and what no model may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from distca.prefill.facts import NOT_QUANTIZED

if TYPE_CHECKING:
    from vllm.config import ModelConfig

PROVED = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
"""Classes of vLLM whose rows were held against vLLM's own. `docs/vllm.md` names them."""


QUANTIZED = (
    "compressed-tensors int-quantized",
    "compressed-tensors pack-quantized",
    "gptq",
    "awq",
)
"""Methods of quantized weights, and their formats, that were held against vLLM's own.
`docs/vllm.md` names them."""


def quantization(model: ModelConfig) -> str:
    """Returns how vLLM quantizes a model's weights: method, and the checkpoint's format if any."""
    if model.quantization is None:
        return NOT_QUANTIZED
    found = getattr(model.hf_config, "quantization_config", None)
    form = found.get("format") if isinstance(found, Mapping) else None
    # Some of vLLM's names say that it chooses the kernel.
    method = str(model.quantization).removeprefix("auto_")
    return f"{method} {form}" if form else method


def check_model(model: ModelConfig) -> None:
    """Refuses models that the ranks cannot compute, by vLLM's configuration of the model alone.

    Args:
        model: vLLM's `ModelConfig`.

    Raises:
        ValueError: it is one of those; the message says what the model has.
    """
    for has, what in (
        (model.runner_type != "generate", "does not generate text"),
        (model.is_encoder_decoder, "has an encoder"),
        (model.is_attention_free, "has no attention"),
        (model.is_hybrid or model.has_inner_state, "has Mamba or linear attention layers"),
        (model.is_multimodal_model, "has encoders of images or sounds"),
        (model.uses_mrope, "has rotary embeddings of several dimensions"),
        (
            model.use_mla and not current_platform.is_cpu(),
            "has multi-latent attention, with heads that no kernel for GPUs has",
        ),
    ):
        if has:
            raise _refused(model, what)
    quantized = quantization(model)
    if quantized not in (NOT_QUANTIZED, *QUANTIZED):
        raise ValueError(
            f"{model.model} has quantized weights ({quantized}), which were not proved: prefill "
            f"ranks run {', '.join(QUANTIZED)}"
        )
    if quantized != NOT_QUANTIZED and model.is_moe:
        raise ValueError(f"{model.model} has quantized experts, which were not proved")
    if model.using_transformers_backend():
        raise _refused(model, f"is a {model.architectures[0]}, for which vLLM has no class")


def check_layers(model: ModelConfig, made: object, layers: Mapping[int, Attention]) -> None:
    """Refuses models that have layers which the ranks cannot compute.

    Args:
        model: vLLM's `ModelConfig`.
        made: the model, with or without weights.
        layers: its attention layers by number.

    Raises:
        ValueError: it has such a layer, or is of a class that was not proved.
    """
    if not layers:
        raise _refused(model, "has no attention")
    for number, layer in layers.items():
        what = _uncovered(layer)
        if what is not None:
            raise _refused(model, f"has {what} in layer {number}")
    kinds = {
        (type(each), each.num_heads, each.num_kv_heads, each.head_size) for each in layers.values()
    }
    if len(kinds) > 1:
        raise _refused(model, "has layers of different heads")
    if len({softcap(each) for each in layers.values()}) > 1:
        raise _refused(model, "has layers of different soft caps")
    if sorted(layers) != list(range(len(layers))):
        raise _refused(model, "has layers without attention")
    if type(made).__name__ not in PROVED:
        raise ValueError(
            f"{model.model} is a {type(made).__name__} of vLLM, which was not proved: prefill "
            f"ranks run {', '.join(PROVED)}"
        )


def attention_layers(context: Mapping[str, object]) -> dict[str, Attention]:
    """Returns the attention layers among what vLLM knows by name."""
    return {name: each for name, each in context.items() if isinstance(each, AttentionLayerBase)}


def softcap(layer: Attention) -> float | None:
    """Bound of a layer's scores, or None."""
    return float(getattr(layer.impl, "logits_soft_cap", None) or 0) or None


def _refused(model: ModelConfig, what: str) -> ValueError:
    return ValueError(f"{model.model} {what}, which prefill ranks do not compute")


def _uncovered(layer: Attention) -> str | None:
    """What a layer has that the ranks do not compute; None: nothing."""
    impl = layer.impl
    if type(layer) is MLAAttention:
        of_latents = {
            "a choice of keys by an indexer": layer.use_sparse or layer.indexer is not None,
            "a window of latent attention": layer.sliding_window is not None,
            "queries that processes of decode context parallelism share": layer.dcp_q_replicate,
            "quantized keys and values": layer.kv_cache_dtype != "auto",
        }
        return next((what for what, has in of_latents.items() if has), None)
    if type(layer) is not Attention:
        return f"a {type(layer).__name__}"
    found = {
        "attention that is not causal": layer.attn_type != AttentionType.DECODER,
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "keys of another layer": layer.kv_sharing_target_layer_name is not None,
        "values of another size": layer.head_size_v != layer.head_size,
        "chunks of attention": getattr(impl, "chunk_lookback", -1) > -1,
        "attention to a prefix in both directions": layer.use_mm_prefix,
        "quantized keys and values": layer.kv_cache_dtype != "auto",
    }
    return next((what for what, has in found.items() if has), None)
