"""A model's configuration of Hugging Face as flags of `pretrain_gpt.py`."""

from __future__ import annotations

from argparse import Action, ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_patches.families.bridges import bridge_of

# What mbridge says of a model, by the names of megatron-core's configuration and of the flags that
# Megatron-LM makes it of.
_DIVISOR = 128
"""Megatron-LM's default of `--make-vocab-size-divisible-by`."""
_TENSOR_SIZES = (1, 2, 4, 8)
_ARCHITECTURE = """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels layernorm_epsilon
    normalization add_bias_linear add_qkv_bias qk_layernorm attention_dropout hidden_dropout
    softmax_type window_size window_attn_skip_freq glu_linear_offset activation_func_clamp_value
    moe_ffn_hidden_size moe_router_topk moe_router_score_function moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk
    moe_router_enable_expert_bias moe_router_dtype moe_router_load_balancing_type moe_layer_freq
    moe_shared_expert_intermediate_size moe_shared_expert_gate
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
""".split()
# What it says besides, which no function of the model depends on, or which is said otherwise here.
PASSED_OVER = {
    *"activation_func gated_linear_unit num_query_groups num_moe_experts".split(),
    *"pipeline_dtype params_dtype bf16 variable_seq_lengths masked_softmax_fusion".split(),
    *"tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size".split(),
    *"expert_model_parallel_size expert_tensor_parallel_size sequence_parallel".split(),
    *"virtual_pipeline_model_parallel_size moe_token_dispatcher_type".split(),
    *"use_cpu_initialization overlap_p2p_comm batch_p2p_comm persist_layer_norm".split(),
    *"bias_activation_fusion bias_dropout_fusion attention_backend moe_grouped_gemm".split(),
    *"moe_shared_expert_overlap disable_bf16_reduced_precision_matmul".split(),
    *"moe_aux_loss_coeff moe_router_bias_update_rate mtp_loss_scaling_factor".split(),
    *"mtp_num_layers rotary_base rotary_scaling_factor rope_type mscale mscale_all_dim".split(),
    *"max_position_embeddings beta_fast beta_slow".split(),
}


def model_flags(config: Any, parser: ArgumentParser) -> list[str]:
    """Returns the flags of a model's architecture, without those of its vocabulary.

    Args:
        config: transformers' configuration of the language model.
        parser: parser of Megatron-LM's flags.

    Raises:
        ValueError: the model has a feature that flags cannot express, or training cannot run.
    """
    bridge = bridge_of(config)
    described: SimpleNamespace = bridge.config
    unknown = {*vars(described)} - {*_ARCHITECTURE} - PASSED_OVER
    assert not unknown, f"mbridge describes {config.model_type} by {unknown}, too"
    if getattr(described, "num_moe_experts", None) and described.moe_router_topk == 1:
        _check_one_expert(described)
    words, actions = [], _actions(parser)
    for name in _ARCHITECTURE:
        value = getattr(described, name, None)
        if name.endswith("dropout"):
            # Fine-tuning on long contexts has none, whatever the model was trained with.
            value = 0.0
        words += _words(actions, name, value)
    layers = bridge.layers()
    words += _activation_flags(described) if layers is None else _layer_flags(layers)
    if getattr(described, "q_lora_rank", None) or getattr(described, "kv_lora_rank", None):
        words.append("--multi-latent-attention")
    else:
        words += [
            "--group-query-attention",
            *_words(actions, "num_query_groups", described.num_query_groups),
        ]
    words += _words(actions, "num_experts", getattr(described, "num_moe_experts", None))
    if not config.tie_word_embeddings:
        words.append("--untie-embeddings-and-output-weights")
    return words + bridge.rotary_flags()


def _check_one_expert(described: SimpleNamespace) -> None:
    """Checks that megatron-core scores the experts of a token that has but one.

    Raises:
        ValueError: it refuses to.
    """
    score = getattr(described, "moe_router_score_function", None) or "softmax"
    if score == "softmax" and not getattr(described, "moe_router_pre_softmax", False):
        raise ValueError(
            "num_experts_per_tok in config.json is 1: megatron-core has no softmax of one score, "
            "which is always 1; only models with more experts per token are converted"
        )


def run_flags(tokenizer: Path, config: Any) -> list[str]:
    """Returns flags of a model that a run chooses: its tokenizer, and its longest positions."""
    flags = ["--max-position-embeddings", str(config.max_position_embeddings)]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    return flags


def padded_vocabulary(tokens: int, divisor: int, tensor: int) -> int:
    """Returns the rows of embeddings that Megatron-LM makes.

    Args:
        tokens: size of the tokenizer's vocabulary.
        divisor: value of `--make-vocab-size-divisible-by`.
        tensor: tensor-parallel size.
    """
    return -(-tokens // (divisor * tensor)) * divisor * tensor


def vocabulary_flags(tokens: int, rows: int, tensor: int | None = None) -> list[str]:
    """Returns flags with which a tokenizer's vocabulary is padded to the embeddings that there are.
    Padding beyond these would change the loss, whose softmax is over all rows.

    Args:
        tokens: size of the tokenizer's vocabulary.
        rows: rows of the embeddings, which may be more.
        tensor: tensor-parallel size; None: it is not known, and the flags are those with which 1
            and most of 2, 4 and 8 can be used.

    Raises:
        ValueError: the tokenizer has more tokens than the embeddings have rows, or the
            tensor-parallel size does not divide these.
    """
    if tokens > rows:
        raise ValueError(
            f"the tokenizer has {tokens} tokens and the model weights for {rows}: make them equal "
            "with transformers' resize_token_embeddings"
        )
    if tensor is not None and rows % tensor:
        raise ValueError(
            f"the model has embeddings of {rows} rows, which --tensor-model-parallel-size {tensor} "
            "does not divide: give a size that does"
        )
    sizes = _TENSOR_SIZES if tensor is None else (tensor,)

    def fitting(divisor: int) -> tuple[bool, int]:
        fit = [padded_vocabulary(tokens, divisor, size) == rows for size in sizes]
        return fit[0], sum(fit)

    if fitting(_DIVISOR) == (True, len(sizes)):
        return []
    divisors = [each for each in range(1, rows + 1) if rows % each == 0]
    return ["--make-vocab-size-divisible-by", str(max(divisors, key=fitting))]


def _activation_flags(described: SimpleNamespace) -> list[str]:
    assert described.gated_linear_unit
    return (
        ["--swiglu"] if described.activation_func is torch.nn.functional.silu else ["--quick-geglu"]
    )


def _layer_flags(layers: str) -> list[str]:
    """Returns the flags of layers of ours, whose gates have a function of their own."""
    spec = ["--spec", "megatron_patches.model.gemma", layers]
    return [*spec, "--transformer-impl", "local", "--swiglu", "--apply-layernorm-1p"]


def _words(actions: Mapping[str, Action], name: str, value: Any) -> list[str]:
    """Returns a flag with its value; nothing where the value is what no flag means."""
    action = actions.get(name)
    if action is None:
        if value in (None, False):
            return []
        raise ValueError(
            f"this version of Megatron-LM has no flag for {name} {value}: update megatron-core"
        )
    flag = action.option_strings[0]
    if action.nargs == 0:
        return [flag] if value == action.const else []
    if value is None:
        return []
    if isinstance(value, tuple):
        return [flag, ",".join(map(str, value))]
    return [flag, str(value).replace(" ", "")]


def _actions(parser: ArgumentParser) -> dict[str, Action]:
    """Returns Megatron-LM's flags by the attributes that they set, the first of each."""
    found: dict[str, Action] = {}
    for action in parser._actions:
        if action.option_strings:
            found.setdefault(action.dest, action)
    if "layernorm_epsilon" not in found:
        # Versions before 0.18 name the attribute as the flag.
        found["layernorm_epsilon"] = found["norm_epsilon"]
    return found
