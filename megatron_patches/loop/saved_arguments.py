"""The flags of the run that made a checkpoint, and whether its model is this run's."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

# Flags that give a checkpoint's tensors their shapes.
_SHAPE_FLAGS = (
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
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)


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


def check_shape(saved: Namespace, args: Namespace, path: str) -> None:
    """Refuses a checkpoint of another model.

    Args:
        saved: flags of the run that made it.
        args: flags of this run.
        path: folder of the checkpoint.

    Raises:
        ValueError: some flag that gives tensors their shapes was another.
    """
    before, now = _shape(saved), _shape(args)
    if getattr(saved, "tokenizer_type", None) == "NullTokenizer":
        # Versions of Megatron-LM differ in whether its --vocab-size counts the end token.
        before["vocab_size"] = None
    different = [
        f"--{name.replace('_', '-')} {value} (now {now[name]})"
        for name, value in before.items()
        if value is not None and value != now[name]
    ]
    if different:
        raise ValueError(
            f"{path} is a checkpoint of another model, trained with {', '.join(different)}: give "
            "those flags, or another --load"
        )


def check_experts(saved: Namespace, args: Namespace, path: str) -> None:
    """Refuses an optimizer's state of experts that ranks share otherwise.

    megatron-core has an optimizer of its own for experts that ranks share, and none for others.

    Args:
        saved: flags of the run that made it.
        args: flags of this run.
        path: folder of the checkpoint.

    Raises:
        ValueError: ranks share experts in one of the two runs alone.
    """
    weights_alone = args.no_load_optim or args.finetune
    if not args.num_experts or weights_alone:
        return
    before, now = (getattr(each, "expert_model_parallel_size", 1) or 1 for each in (saved, args))
    if (before == 1) != (now == 1):
        raise ValueError(
            f"{path} holds the optimizer's state for --expert-model-parallel-size {before}, which "
            f"does not load with {now}: give that, or --no-load-optim"
        )


def _shape(flags: Namespace) -> dict[str, Any]:
    shape = {name: vars(flags).get(name) for name in _SHAPE_FLAGS}
    if not vars(flags).get("group_query_attention", True):
        shape["num_query_groups"] = flags.num_attention_heads
    return shape
