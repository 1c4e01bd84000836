"""The planner's configuration from the flags: costs, links and sizes."""

from __future__ import annotations

import logging
from argparse import Namespace

from distca.cost.kernel_time import AnalyticCost, CostModel
from distca.cost.profile import Profile
from distca.schedule import LinearWork, ScheduleConfig
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import attention_shape
from megatron_patches.flags.latent_attention import has_latents, head_sizes
from megatron_patches.flags.latent_rows import comm_shape
from megatron_patches.flags.sizes import layer_parameters

logger = logging.getLogger(__name__)


def schedule_config(config: DistcaConfig, args: Namespace, servers: int) -> ScheduleConfig:
    """Makes the scheduler's configuration.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.
        servers: number of attention servers.

    Raises:
        ValueError: the profile is unreadable or of another attention shape; or speeds are given for
            another number of servers.
    """
    flags, shape = config.scheduling, attention_shape(args)
    cost_model: CostModel
    if flags.profile is not None:
        cost_model = Profile.load(flags.profile)
        if cost_model.shape != shape:
            raise ValueError(
                f"--distca-profile {flags.profile} was measured for {cost_model.shape}, but "
                f"a tensor-parallel rank of this run has {shape}: profile that"
            )
    else:
        logger.info("no --distca-profile: loads are judged by pair counts, not by measured times")
        cost_model = AnalyticCost.of_shape(shape)
    travelling = comm_shape(config, args)
    if has_latents(args):
        what = "keys and values" if travelling.kv_rank is None else "latents"
        logger.info("%s travel to attention servers (--distca-latent-rows)", what)
    made = ScheduleConfig(
        tolerance=flags.tolerance,
        shape=travelling,
        cost_model=cost_model,
        links=flags.links(args.tensor_model_parallel_size),
        server_speeds=flags.server_speeds,
        max_buffer_bytes=flags.max_buffer_bytes,
        context_parallel_size=flags.context_parallel_size,
    )
    made.speeds_of(servers)
    return made


def linear_work(args: Namespace) -> LinearWork:
    """Counts the linear layers of the model, beside which attention is shared out in a pipeline."""
    chunks = args.pipeline_model_parallel_size * chunks_of_a_stage(args)
    return LinearWork.of_parameters(
        layer_parameters(args),
        args.hidden_size * args.padded_vocab_size,
        args.num_layers // chunks,
        args.num_attention_heads * sum(head_sizes(args)) // 2,
    )


def chunks_of_a_stage(args: Namespace) -> int:
    """Returns the number of model chunks (virtual stages) of each pipeline stage."""
    return args.virtual_pipeline_model_parallel_size or 1


def number_of_servers(config: DistcaConfig, args: Namespace) -> int:
    """Returns the number of attention servers of each tensor-parallel index."""
    in_place = args.data_parallel_size * args.pipeline_model_parallel_size
    return int(in_place + config.dedicated // args.tensor_model_parallel_size)
