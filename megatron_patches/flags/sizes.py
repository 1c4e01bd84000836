"""Sizes that follow from the flags: of the model, and of its checkpoints."""

from __future__ import annotations

from argparse import Namespace

import torch

from megatron_patches.flags.latent_attention import attention_parameters
from megatron_patches.versions import newer_flag


def layer_parameters(args: Namespace, active: bool = True) -> int:
    """Counts the parameters of the mean layer's matrices.

    Args:
        args: Megatron-LM's arguments.
        active: count those alone that a token uses, not all experts.
    """
    dense = args.hidden_size * _matrices(args) * args.ffn_hidden_size
    if args.num_experts:
        part = share_with_experts(args.moe_layer_freq, args.num_layers)
        dense = part * _expert_layer(args, active) + (1 - part) * dense
    return round(attention_parameters(args) + dense)


def expert_parameters(args: Namespace) -> int:
    """Counts the parameters of a layer's experts, but for the shared one."""
    width = newer_flag(args, "moe_latent_size") or args.hidden_size
    return int(args.num_experts * width * _matrices(args) * args.moe_ffn_hidden_size)


def _expert_layer(args: Namespace, active: bool) -> int:
    """Counts the parameters of a layer's experts, the shared one and what leads to them."""
    routed = expert_parameters(args)
    if active:
        routed = routed // args.num_experts * args.moe_router_topk
    shared = _matrices(args) * (args.moe_shared_expert_intermediate_size or 0)
    latent = newer_flag(args, "moe_latent_size") or 0
    return int(routed + args.hidden_size * (shared + 2 * latent))


def _matrices(args: Namespace) -> int:
    """Returns the number of matrices of an MLP."""
    return 3 if args.swiglu else 2


def share_with_experts(pattern: int | list[int], layers: int) -> float:
    """Returns the part of the layers that have experts.

    Args:
        pattern: `--moe-layer-freq`: every so many-th layer has experts, or 1 for each that has.
        layers: number of layers.
    """
    if isinstance(pattern, int):
        return len(range(0, layers, pattern)) / layers
    return sum(pattern) / len(pattern)


def matrix_parameters(args: Namespace) -> int:
    """Counts the parameters of all matrices of the model, which are nearly all that it has."""
    embeddings = 2 if args.untie_embeddings_and_output_weights else 1
    vocabulary = embeddings * args.padded_vocab_size * args.hidden_size
    return int(args.num_layers * layer_parameters(args, active=False) + vocabulary)


def checkpoint_bytes(args: Namespace) -> int:
    """Counts the bytes that a checkpoint of the run needs at least.

    Those of the weights and, unless `--no-save-optim`, of what the optimizer keeps for each.
    """
    state = 0 if args.no_save_optim else optimizer_bytes(args)
    return matrix_parameters(args) * (args.params_dtype.itemsize + state)


def optimizer_bytes(args: Namespace) -> int:
    """Returns the least bytes that the optimizer keeps for each parameter.

    Those of Adam's two moments, and of the weight itself where it has 16 bits or the optimizer is
    distributed.
    """
    state = 0
    if args.optimizer == "adam":
        state = _itemsize(args.exp_avg_dtype) + _itemsize(args.exp_avg_sq_dtype)
    if args.params_dtype.itemsize < 4 or args.use_distributed_optimizer:
        state += _itemsize(args.main_params_dtype)
    return state


def _itemsize(dtype: torch.dtype | str) -> int:
    """Returns the bytes of a value of the optimizer's state; types of other names are of fp8."""
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 1
