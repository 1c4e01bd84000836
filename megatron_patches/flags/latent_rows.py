"""Whether latents of multi-latent attention travel instead of keys and values."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from distca.cost.latent_rows import latents_pay
from distca.cost.volume import AttentionShape
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.sizes import ModelSizes


def why_no_latents_travel(config: DistcaConfig, args: Namespace) -> str | None:
    """Returns why keys and values must travel themselves, and what to do; None: they need not."""
    if not args.multi_latent_attention:
        return "only --multi-latent-attention has latents: add it"
    if config.head_parallel > 1:
        return "ranks share heads, and a latent is of all heads: remove --distca-head-parallel-size"
    if config.dedicated:
        return "dedicated servers have no weights to expand them: remove --distca-servers"
    if args.pipeline_model_parallel_size > 1 and config.scheduling.pool_stages:
        return (
            "servers of other pipeline stages lack the layer's weight to expand them: add "
            "--no-distca-pool-stages"
        )
    if "mla_up_proj" in (args.recompute_modules or ()):
        return "with mla_up_proj in --recompute-modules they have no gradient: remove it"
    for name in ("fp8", "fp4"):
        if vars(args)[name]:
            return f"they are expanded in the precision of weights: remove --{name}-format"
    return None


def comm_shape(config: DistcaConfig, args: Namespace) -> AttentionShape:
    """Returns the attention heads of one rank, with what travels for their keys and values.

    Raises:
        ValueError: latents are asked for, and cannot travel.
    """
    sizes = ModelSizes.from_args(args)
    shape = sizes.attention_shape(args.tensor_model_parallel_size * config.head_parallel)
    reason = why_no_latents_travel(config, args)
    if config.latent_rows == "on" and reason is not None:
        raise ValueError(f"--distca-latent-rows on: {reason}; or give auto")
    if config.latent_rows == "off" or reason is not None:
        return shape
    assert sizes.latents is not None
    latents = replace(shape, kv_rank=sizes.latents.kv_rank, rotated_dim=sizes.latents.rotated_dim)
    links = config.scheduling.links(args.tensor_model_parallel_size)
    pay = latents_pay(latents, links, args.data_parallel_size, config.backward)
    return latents if config.latent_rows == "on" or pay else shape
