"""The flags of the run that made a checkpoint, held against those of this run."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

# Flags that give a checkpoint's tensors their names and shapes.
MODEL_FLAGS: tuple[str, ...] = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "normalization",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "attention_output_gate",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_enable_expert_bias",
    "moe_latent_size",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
)
# Flags that give the optimizer's state its names and shapes.
_OPTIMIZER: tuple[str, ...] = (
    "optimizer",
    "bf16",
    "fp16",
    "use_distributed_optimizer",
    "decoupled_lr",
)
# Flags that change what the same weights compute.
FUNCTION_FLAGS: tuple[str, ...] = (
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "no_rope_freq",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
    "window_size",
    "window_attn_skip_freq",
    "chunk_attention_size",
    "softmax_type",
    "layernorm_epsilon",
    "apply_layernorm_1p",
    "layernorm_zero_centered_gamma",
    "spec",
    "squared_relu",
    "quick_geglu",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "openai_gelu",
    "apply_residual_connection_post_layernorm",
    "add_position_embedding",
    "mrope_section",
    "use_mup",
    "mup_width_mult",
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_base_head_dim",
    "mup_attn_scale_power",
    "moe_apply_probs_on_input",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
)
_DATA: tuple[str, ...] = ("seed", "split")
# Values of the optimizer that are loaded with its state, whatever the flags say.
_LOADED: tuple[str, ...] = ("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum")
# Flags that turn off what their names in Megatron-LM's arguments turn on.
_INVERSE = {
    "add_bias_linear": "disable_bias_linear",
    "add_position_embedding": "no_position_embedding",
}
_OTHER_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}


def saved_arguments(common: dict[str, Any]) -> Namespace:
    """Returns the flags of the run that made a checkpoint.

    Args:
        common: what the checkpoint keeps beside tensors.

    Raises:
        ValueError: there are none.
    """
    saved = common.get("args")
    if not isinstance(saved, Namespace):
        raise ValueError("the checkpoint of --load has no flags of the run that made it")
    if not hasattr(saved, "norm_epsilon") and hasattr(saved, "layernorm_epsilon"):
        # What 0.18 and later make of the flag.
        saved.norm_epsilon = saved.layernorm_epsilon
    return saved


def check_model(saved: Namespace, args: Namespace, path: str) -> None:
    """Refuses a checkpoint of another model or optimizer; warns where the model's function differs.

    Args:
        saved: flags of the run that made it.
        args: flags of this run.
        path: folder of the checkpoint.

    Raises:
        ValueError: a flag that gives tensors their names and shapes differs.
    """
    names = MODEL_FLAGS
    if "learnable" in {getattr(each, "softmax_type", None) for each in (saved, args)}:
        # Learnable sinks are weights.
        names = (*names, "softmax_type")
    if different := _differences(names, saved, args):
        raise ValueError(
            f"{path} is a checkpoint of another model, trained with {different}: give those flags, "
            "or another --load"
        )
    if loads_optimizer(args):
        _check_optimizer(saved, args, path)
    if args.rank:
        return
    names = FUNCTION_FLAGS if args.finetune else (*FUNCTION_FLAGS, *_DATA)
    if different := _differences(names, saved, args):
        logger.warning(
            "%s was trained with %s: this run goes on with its own flags", path, different
        )
    if loads_optimizer(args) and (different := _differences(_LOADED, saved, args)):
        logger.warning(
            "%s was trained with %s: the optimizer goes on with the checkpoint's values",
            path,
            different,
        )


def model_differences(saved: Namespace, args: Namespace) -> str:
    """Returns flags by which two models differ in their weights or function; empty if none do.

    Args:
        saved: flags of the run that made a checkpoint.
        args: flags of a model that is to be the same.
    """
    names = [name for name in (*MODEL_FLAGS, *FUNCTION_FLAGS) if name != "vocab_size"]
    return _differences(names, saved, args)


def loads_optimizer(args: Namespace) -> bool:
    """Returns whether a checkpoint's optimizer and schedule are loaded, and not the weights
    alone."""
    return not (args.no_load_optim or args.finetune)


def _check_optimizer(saved: Namespace, args: Namespace, path: str) -> None:
    if getattr(saved, "no_save_optim", False):
        raise ValueError(f"{path} has no optimizer's state (--no-save-optim): add --no-load-optim")
    different = _differences(_OPTIMIZER, saved, args)
    if args.num_experts:
        # megatron-core has an optimizer of its own for experts that ranks share.
        name = "expert_model_parallel_size"
        before, now = (getattr(each, name, 1) or 1 for each in (saved, args))
        if (before == 1) != (now == 1):
            different = ", ".join(filter(None, (different, _differences((name,), saved, args))))
    if different:
        raise ValueError(
            f"{path} holds the optimizer's state of a run with {different}: give those flags, or "
            "--no-load-optim"
        )


def _differences(names: Iterable[str], saved: Namespace, args: Namespace) -> str:
    """Returns the flags that differ, each with both values; one that either run lacks does not."""
    before, now = vars(saved), vars(args)
    found = []
    for name in names:
        if name not in before or name not in now:
            continue
        was, is_now = (_comparable(name, each) for each in (before, now))
        if was != is_now and not (name == "vocab_size" and _counts_otherwise(saved)):
            found.append(_difference(name, was, is_now))
    return ", ".join(found)


def _comparable(name: str, flags: dict[str, Any]) -> Any:
    value = flags[name]
    if name == "num_query_groups" and not flags.get("group_query_attention", True):
        # Without groups Megatron-LM has 1 there, which nobody reads.
        return flags["num_attention_heads"]
    if name == "decoupled_lr":
        # A group of parameters more, whatever the rate.
        return value is not None
    return tuple(value) if isinstance(value, list) else value


def _counts_otherwise(saved: Namespace) -> bool:
    """Returns whether versions of Megatron-LM differ in what a checkpoint's `vocab_size` counts."""
    return saved.vocab_size is None or getattr(saved, "tokenizer_type", None) == "NullTokenizer"


def _difference(name: str, was: Any, now: Any) -> str:
    if isinstance(was, bool) and isinstance(now, bool):
        flag = f"--{_INVERSE.get(name, name).replace('_', '-')}"
        return f"no {flag}" if was == (name in _INVERSE) else flag
    return f"--{_OTHER_NAMES.get(name, name).replace('_', '-')} {was} (now {now})"
