"""Flags of multi-latent attention, and the sizes that follow from them."""

from __future__ import annotations

from argparse import Namespace


def head_sizes(args: Namespace) -> tuple[int, int]:
    """Returns the elements of a key's head, and of a value's."""
    if args.multi_latent_attention:
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return args.kv_channels, args.kv_channels


def attention_parameters(args: Namespace) -> int:
    """Counts the parameters of a layer's projections around core attention."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    of_key, of_value = head_sizes(args)
    if not args.multi_latent_attention:
        groups = args.num_query_groups if args.group_query_attention else heads
        return int(hidden * (2 * heads + 2 * groups) * of_key)
    rank, rotated = args.kv_lora_rank, args.qk_pos_emb_head_dim
    if args.q_lora_rank is None:
        queries = hidden * heads * of_key
    else:
        queries = args.q_lora_rank * (hidden + heads * of_key)
    keys = hidden * (rank + rotated) + rank * heads * (args.qk_head_dim + of_value)
    return int(queries + keys + heads * of_value * hidden)


def check_latent_attention(args: Namespace) -> None:
    """Checks the flags of multi-latent attention against each other.

    Raises:
        ValueError: some do not go together; the message says what to do.
    """
    if not args.multi_latent_attention:
        if args.rope_type == "yarn":
            raise ValueError("--rope-type yarn needs --multi-latent-attention")
        return
    if args.group_query_attention:
        raise ValueError(
            "--multi-latent-attention has keys and values for each head: remove "
            "--group-query-attention"
        )
    if args.qk_pos_emb_head_dim % 2:
        raise ValueError(
            f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim}: rotary embedding turns pairs, so "
            "give an even number"
        )
    parallel = args.tensor_model_parallel_size
    latents = {"kv": args.kv_lora_rank + args.qk_pos_emb_head_dim, "q": args.q_lora_rank or 0}
    for kind, size in latents.items():
        if args.transformer_impl == "local" and size % parallel:
            raise ValueError(
                f"--tensor-model-parallel-size {parallel} does not divide the latent of "
                f"--{kind}-lora-rank ({size} in all): use a size that does"
            )
    if args.transformer_impl != "local" and parallel > 1 and not args.sequence_parallel:
        raise ValueError(
            "--multi-latent-attention with --tensor-model-parallel-size needs --sequence-parallel: "
            "otherwise Transformer Engine's layers sum no gradients of what keys of all heads share"
        )
