"""The planner's configuration from the flags: costs, links and sizes."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import dataclass, replace

from distca.cost.kernel_time import AnalyticCost, CostModel
from distca.cost.profile import Profile
from distca.plan import LayerMasks
from distca.schedule import ExecutionOptions, LinearWork, ScheduleConfig
from distca.schedule.program import LayerGroup, layer_groups
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import masks_of_a_chunk
from megatron_patches.flags.latent_rows import comm_shape
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.sizes import ModelSizes

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
    flags, gpus = config.scheduling, args.tensor_model_parallel_size * config.head_parallel
    shape = ModelSizes.from_args(args).attention_shape(gpus)
    cost_model: CostModel
    if flags.profile is not None:
        profile = Profile.load(flags.profile)
        if profile.shape != shape:
            raise ValueError(
                f"--distca-profile {flags.profile} was measured for {profile.shape}, but "
                f"a rank of this run has {shape}: profile that"
            )
        cost_model = profile.of_training()
    else:
        logger.info("no --distca-profile: plans balance query-key pairs, not measured times")
        cost_model = AnalyticCost.of_shape(shape)
    travelling = comm_shape(config, args)
    if args.multi_latent_attention:
        what = "keys and values" if travelling.kv_rank is None else "latents"
        logger.info("%s travel to attention servers (--distca-latent-rows)", what)
    made = ScheduleConfig(
        tolerance=flags.tolerance,
        shape=travelling,
        cost_model=cost_model,
        links=flags.links(gpus),
        server_speeds=flags.server_speeds,
        max_buffer_bytes=flags.max_buffer_bytes,
        context_parallel_size=flags.context_parallel_size,
    )
    made.speeds_of(servers)
    return made


def linear_work(args: Namespace) -> LinearWork:
    """Counts the linear layers of the model, beside which attention is shared out in a pipeline."""
    model, ranks = ModelSizes.from_args(args), ParallelSizes.from_args(args)
    return LinearWork.of_parameters(
        model.layer_parameters(),
        model.hidden_size * model.vocabulary,
        model.layers // (ranks.stages * ranks.chunks),
        model.heads * (model.head_dim + model.v_head_dim) // 2,
    )


def _layer_groups(args: Namespace, layers: int) -> tuple[LayerGroup, ...]:
    """Groups a model chunk's layers, and behind them those of multi-token prediction, which run one
    by one.

    Args:
        args: Megatron-LM's arguments.
        layers: number of the chunk's other layers.
    """
    recompute = args.recompute_granularity, args.recompute_method
    last = layers + (args.mtp_num_layers or 0)
    return layer_groups(layers, *recompute, args.recompute_num_layers) + tuple(
        LayerGroup(range(number, number + 1), recompute == ("full", "uniform"))
        for number in range(layers, last)
    )


@dataclass(frozen=True)
class PlannerConfig:
    """What global batches are planned by, beside their documents.

    Attributes:
        schedule: costs and links.
        training: how global batches of training run.
        masks: masks of a model chunk's layers.
        linear_work: linear layers, beside which attention is shared out.
        layer_groups: groups of a model chunk's layers whose backward passes run together.
        sequence_shards, head_parallel: as for `ParallelSizes`.
    """

    schedule: ScheduleConfig
    training: ExecutionOptions
    masks: LayerMasks
    linear_work: LinearWork
    layer_groups: tuple[LayerGroup, ...]
    sequence_shards: int
    head_parallel: int

    @classmethod
    def from_args(cls, config: DistcaConfig, args: Namespace, servers: int) -> PlannerConfig:
        """Makes the value of all flags.

        Args:
            config: our flags.
            args: Megatron-LM's arguments.
            servers: number of attention servers.

        Raises:
            ValueError: see `schedule_config`.
        """
        sizes = ParallelSizes.from_args(args, config.head_parallel)
        return cls(
            schedule=schedule_config(config, args, servers),
            training=config.execution_options(sizes.chunks),
            masks=masks_of_a_chunk(args),
            linear_work=linear_work(args),
            layer_groups=_layer_groups(args, args.num_layers // (sizes.stages * sizes.chunks)),
            sequence_shards=sizes.sequence_shards,
            head_parallel=sizes.head_parallel,
        )

    def options(self, forward_only: bool) -> ExecutionOptions:
        """Returns how global batches run; those of evaluations, if `forward_only`."""
        return replace(self.training, forward_only=forward_only)
