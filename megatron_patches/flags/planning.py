"""The planner's configuration from the flags: costs and links, and how global batches run."""

from __future__ import annotations

import logging
from argparse import Namespace

from distca.cost.kernel_time import AnalyticCost, CostModel
from distca.cost.profile import Profile
from distca.schedule import ExecutionOptions, LinearWork, ScheduleConfig
from megatron_patches.flags.distca import attention_shape
from megatron_patches.flags.latent_attention import has_latents, head_sizes
from megatron_patches.flags.latent_rows import links_of, travelling_shape
from megatron_patches.flags.sizes import layer_parameters

logger = logging.getLogger(__name__)


def schedule_config(args: Namespace, servers: int) -> ScheduleConfig:
    """Makes the scheduler's configuration of the arguments.

    Raises:
        ValueError: the profile is unreadable or of another attention shape; or speeds are given for
            another number of servers.
    """
    shape = attention_shape(args)
    cost_model: CostModel
    if args.distca_profile is not None:
        cost_model = Profile.load(args.distca_profile)
        if cost_model.shape != shape:
            raise ValueError(
                f"--distca-profile {args.distca_profile} was measured for {cost_model.shape}, but "
                f"a tensor-parallel rank of this run has {shape}: profile that"
            )
    else:
        logger.info("no --distca-profile: loads are judged by pair counts, not by measured times")
        cost_model = AnalyticCost.of_shape(shape)
    travelling = travelling_shape(args)
    if has_latents(args):
        what = "keys and values" if travelling.kv_rank is None else "latents"
        logger.info("%s travel to attention servers (--distca-latent-rows)", what)
    config = ScheduleConfig(
        tolerance=args.distca_tolerance,
        shape=travelling,
        cost_model=cost_model,
        links=links_of(args),
        server_speeds=args.distca_server_speeds,
        max_buffer_bytes=args.distca_max_buffer_bytes,
        context_parallel_size=args.distca_context_parallel_size,
    )
    config.speeds_of(servers)
    return config


def linear_work(args: Namespace) -> LinearWork:
    """Counts the linear layers of the model, beside which attention is shared out in a pipeline."""
    chunks = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    return LinearWork.of_parameters(
        layer_parameters(args),
        args.hidden_size * args.padded_vocab_size,
        args.num_layers // chunks,
        args.num_attention_heads * sum(head_sizes(args)) // 2,
    )


def execution_options(args: Namespace, forward_only: bool = False) -> ExecutionOptions:
    """Returns how global batches of training run; of evaluations, if `forward_only`."""
    return ExecutionOptions(
        scheduler=args.distca_scheduler,
        free_placement=args.distca_placement == "free",
        ping_pong=args.distca_ping_pong,
        pool_stages=args.distca_pool_stages,
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        max_in_flight=args.distca_max_in_flight,
        forward_only=forward_only,
        chain=args.distca_chain,
    )
