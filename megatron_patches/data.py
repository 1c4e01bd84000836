"""From `--data-path` to the iterators of micro-batches that a training loop consumes."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from distca.attention import select_kernel
from distca.cost.link import Links
from distca.cost.model import AnalyticCost, CostModel
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.runtime import CoreAttention
from distca.schedule import (
    ScheduleConfig,
    describe,
    format_summary,
    make_scheduler,
)
from distca.transport import CollectiveTransport
from megatron_patches.arguments import mask_from_args
from megatron_patches.batch import MicroBatches, PackedBatches, PlannedBatches, WindowLayout
from megatron_patches.job import DataIterators
from megatron_patches.model import uses_dense_mask, uses_own_attention
from megatron_patches.stream import TokenStream, parse_data_path

logger = logging.getLogger(__name__)


def attention_shape(args: Namespace) -> AttentionShape:
    """The attention heads of one tensor-parallel rank."""
    parallel = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return AttentionShape(
        heads=args.num_attention_heads // parallel,
        kv_heads=groups // parallel,
        head_dim=args.kv_channels,
        dtype_bytes=args.params_dtype.itemsize,
    )


def schedule_config(args: Namespace, servers: int) -> ScheduleConfig:
    """What the arguments tell the scheduler.

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
    config = ScheduleConfig(
        tolerance=args.distca_tolerance,
        shape=shape,
        cost_model=cost_model,
        links=Links(
            # The ranks of one tensor-parallel index stand so many GPUs apart.
            max(1, args.distca_gpus_per_node // args.tensor_model_parallel_size),
            args.distca_node_gb_per_s,
            args.distca_network_gb_per_s,
        ),
        server_speeds=args.distca_server_speeds,
        max_buffer_bytes=args.distca_max_buffer_bytes,
        context_parallel_size=args.distca_context_parallel_size,
    )
    config.speeds_of(servers)
    return config


def build_core_attention(args: Namespace, device: torch.device) -> CoreAttention:
    """What runs the plans: a transport over the ranks of this tensor-parallel index. Collective."""
    return CoreAttention(
        CollectiveTransport(_own_data_parallel_group()),
        select_kernel(device.type),
        args.distca_backward,
    )


def _own_data_parallel_group() -> dist.ProcessGroup:
    """A second group over this rank's data-parallel ranks, for the exchange alone."""
    mine = tuple(dist.get_process_group_ranks(parallel_state.get_data_parallel_group()))
    everyones: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted(set(everyones))}
    return groups[mine]


def window_layout(args: Namespace) -> WindowLayout:
    """This rank's part of every window."""
    return WindowLayout(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        args.seq_length,
        args.micro_batch_size,
    )


def build_data(
    args: Namespace, train_samples: int, valid_samples: int, test_samples: int
) -> DataIterators:
    """The three splits' micro-batches, resumed where the run stands. Collective with `--distca`.

    Args:
        args: Megatron-LM's arguments; `consumed_train_samples` and `consumed_valid_samples` say
            where to resume.
        train_samples: samples of the whole run, also those consumed before; 0 for no iterator.
        valid_samples: likewise for validation.
        test_samples: likewise for the test.

    Raises:
        ValueError: the data is missing, corrupt or of another vocabulary; or the consumed samples
            are no whole number of micro-batches.
    """
    if not args.data_path:
        raise ValueError("give --data-path: the prefix of an indexed dataset (.bin and .idx)")
    layout = window_layout(args)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else (torch.device("cpu"))
    )
    make = batch_maker(args, layout, device)
    prefixes, weights = parse_data_path(args.data_path)

    def iterator(
        which: Literal["train", "valid", "test"], samples: int, consumed: int
    ) -> MicroBatches | None:
        if samples <= 0:
            return None
        if consumed % layout.samples_per_micro_batch:
            raise ValueError(
                f"{consumed} samples were consumed before, which is no whole number of "
                f"micro-batches of {layout.samples_per_micro_batch} samples: resume with a "
                "data-parallel size times --micro-batch-size that divides it"
            )
        stream = TokenStream.open(
            prefixes,
            weights,
            split=args.split,
            which=which,
            seed=args.seed,
            # One micro-batch more: the iterators work one ahead.
            num_tokens=(samples + layout.samples_per_micro_batch) * args.seq_length,
            max_document_length=args.distca_max_document_length or layout.window_tokens,
            vocab_size=args.vocab_size,
        )
        batches = make(stream, consumed)
        if which == "train" and isinstance(batches, PlannedBatches):
            plan = batches.plan(consumed)
            summary = describe(plan, batches.schedule_config, args.distca_backward)
            logger.info("the first plan of the run:\n%s", format_summary(summary))
        return MicroBatches(batches, consumed, layout.samples_per_micro_batch, device)

    return DataIterators(
        train=iterator("train", train_samples, args.consumed_train_samples),
        valid=iterator("valid", valid_samples, args.consumed_valid_samples),
        test=iterator("test", test_samples, 0),
    )


def batch_maker(
    args: Namespace, layout: WindowLayout, device: torch.device
) -> Callable[[TokenStream, int], PackedBatches | PlannedBatches]:
    """How micro-batches are made of a stream: planned with `--distca`, else packed. Collective.

    Returns:
        A function of the stream and of the sample at which the run reads on.
    """
    mask = mask_from_args(args)
    if not args.distca:
        dense, token_positions = uses_dense_mask(args), uses_own_attention(args)
        return lambda stream, _: PackedBatches(stream, layout, mask, dense, token_positions)
    config = schedule_config(args, layout.data_parallel_size)
    scheduler = make_scheduler(args.distca_scheduler, config)
    core_attention = build_core_attention(args, device)
    # While the batch size grows, a global batch is not always as many micro-batches.
    ramps_up = getattr(args, "rampup_batch_size", None) is not None
    micro_batches = args.global_batch_size // layout.samples_per_micro_batch
    return lambda stream, first_sample: PlannedBatches(
        stream,
        layout,
        mask,
        scheduler,
        config,
        args.distca_placement == "free",
        1 if ramps_up else micro_batches,
        first_sample,
        core_attention,
        args.num_layers,
    )
