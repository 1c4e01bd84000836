"""From `--data-path` to the iterators of micro-batches that a training loop consumes."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from distca.attention import select_kernel
from distca.cost.link import Links
from distca.cost.model import AnalyticCost, CostModel
from distca.cost.profile import Profile
from distca.plan import Mask
from distca.runtime import Buffers, CoreAttention, Trace
from distca.schedule import (
    BALANCING,
    Phase,
    ScheduleConfig,
    describe,
    format_summary,
    make_scheduler,
    most_in_flight_of_1f1b,
    move_tiles,
    tick_schedule,
)
from megatron_patches.arguments import attention_shape, mask_from_args
from megatron_patches.batch import MicroBatches, PackedBatches, WindowLayout
from megatron_patches.dedicated import Processes
from megatron_patches.groups import warning_of_groups_of_one
from megatron_patches.job import DataIterators
from megatron_patches.model import uses_dense_mask, uses_own_attention
from megatron_patches.planned_batches import NANO_BATCHES, PlannedBatches
from megatron_patches.rounds import rounds_of_tick
from megatron_patches.servers import find_servers
from megatron_patches.stream import TokenStream, parse_data_path
from megatron_patches.tick_batches import TickBatches, TickStream
from megatron_patches.transports import make_transport

logger = logging.getLogger(__name__)


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


def build_core_attention(
    args: Namespace, group: dist.ProcessGroup, device: torch.device
) -> CoreAttention:
    """What runs the plans of the ranks of a group. Collective."""
    return CoreAttention(
        make_transport(args, group, device),
        select_kernel(device.type),
        Buffers(device, len(NANO_BATCHES) if args.distca_ping_pong else 1, args.distca_head_groups),
        args.distca_backward,
        Trace(device),
    )


def window_layout(args: Namespace) -> WindowLayout:
    """This rank's part of every window; a dedicated server reads no tokens."""
    processes: Processes | None = getattr(args, "processes", None)
    serves_only = processes is not None and processes.serves_only
    return WindowLayout(
        0 if serves_only else parallel_state.get_data_parallel_rank(),
        args.data_parallel_size,
        args.seq_length,
        args.micro_batch_size,
    )


def model_device() -> torch.device:
    """Where this process has its model."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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
    device = model_device()
    make = batch_maker(args, layout, device)
    control = make.servers.control if isinstance(make, PlannedMaker) else None
    if control is not None:
        control.share_consumed(args)
    prefixes, weights = parse_data_path(args.data_path)

    def iterator(
        which: Literal["train", "valid", "test"], samples: int, consumed: int
    ) -> MicroBatches | TickStream | None:
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
        if not isinstance(make, PlannedMaker):
            return MicroBatches(make(stream), consumed, layout.samples_per_micro_batch, device)
        batches = make(stream, forward_only=which != "train")
        if control is not None:
            batches = replace(batches, announce=partial(control.announce, which))
        if which == "train":
            _log_first_plan(args, batches, consumed)
        # Evaluations are not ramped up.
        count = make.micro_batches if which == "train" else lambda _: make.micro_batches_at_last
        return TickStream(batches, consumed, count, device)

    return DataIterators(
        train=iterator("train", train_samples, args.consumed_train_samples),
        valid=iterator("valid", valid_samples, args.consumed_valid_samples),
        test=iterator("test", test_samples, 0),
        control=control,
        end=make.close if isinstance(make, PlannedMaker) else None,
    )


def batch_maker(
    args: Namespace, layout: WindowLayout, device: torch.device
) -> PlannedMaker | Callable[[TokenStream], PackedBatches]:
    """How micro-batches are made of a stream: planned with `--distca`, else packed. Collective."""
    mask = mask_from_args(args)
    if not args.distca:
        dense, token_positions = uses_dense_mask(args), uses_own_attention(args)
        return lambda stream: PackedBatches(stream, layout, mask, dense, token_positions)
    return PlannedMaker(args, layout, mask, device)


class PlannedMaker:
    """Makes the ticks of a run's splits. Collective.

    Args:
        args: Megatron-LM's arguments.
        layout: windows and ranks.
        mask: what a query sees.
        device: where the model is.

    Attributes:
        servers: who exchanges with this process.
        core_attention: runs the plans.
        micro_batches: of the global batch that starts at a sample of the training split.
        micro_batches_at_last: of a global batch that is not ramped up.
    """

    def __init__(
        self, args: Namespace, layout: WindowLayout, mask: Mask, device: torch.device
    ) -> None:
        self._args, self._layout, self._mask = args, layout, mask
        self.servers = find_servers(args, device)
        self.core_attention = build_core_attention(args, self.servers.group, device)
        self._pipeline = self.servers.layout
        self._config = schedule_config(args, self._pipeline.world_size)
        layers = args.num_layers // (self._pipeline.stages * self._pipeline.chunks)
        phases: tuple[Phase, ...] = ("forward", "backward")
        self._rounds = {phase: rounds_of_tick(phase, layers, args) for phase in phases}
        self.micro_batches_at_last = args.global_batch_size // layout.samples_per_micro_batch
        self.micro_batches = _micro_batches_at(args, layout, self.micro_batches_at_last)

    def __call__(self, stream: TokenStream, forward_only: bool) -> TickBatches:
        """The ticks of a split's stream."""
        args, servers, config = self._args, self._pipeline.servers, self._config
        # A micro-batch is placed alike in all stages.
        of_stage = config
        if config.server_speeds is not None:
            speeds = np.array(config.server_speeds)[servers].mean(axis=0)
            of_stage = replace(config, server_speeds=tuple(speeds.tolist()))
        pooled = (len(servers) > 1 and args.distca_pool_stages) or self._pipeline.dedicated > 0
        schedule = partial(
            tick_schedule,
            stages=len(servers),
            chunks=self._pipeline.chunks,
            max_in_flight=args.distca_max_in_flight,
            forward_only=forward_only,
        )
        return TickBatches(
            PlannedBatches(
                stream,
                self._layout,
                self._mask,
                make_scheduler(args.distca_scheduler, of_stage),
                of_stage,
                args.distca_placement == "free",
                args.distca_ping_pong,
                args.tensor_model_parallel_size if args.sequence_parallel else 1,
            ),
            self._pipeline,
            lru_cache(maxsize=None)(schedule),
            make_scheduler(args.distca_scheduler, config) if pooled else None,
            # Without pooling what moves stays within a stage.
            partial(move_tiles, config=config if pooled else of_stage)
            if args.distca_scheduler in BALANCING
            else None,
            self._rounds,
            self.core_attention,
        )

    def close(self) -> None:
        """Gives back what the transport holds; no tick may follow."""
        self.core_attention.transport.close()


def _micro_batches_at(args: Namespace, layout: WindowLayout, at_last: int) -> Callable[[int], int]:
    """The number of micro-batches of the global batch that starts at a sample."""
    ramp = getattr(args, "rampup_batch_size", None)
    if ramp is None:
        return lambda sample: at_last
    start, step, samples = (int(value) for value in ramp)
    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        args.global_batch_size,
        args.micro_batch_size,
        layout.data_parallel_size,
        getattr(args, "decrease_batch_size_if_needed", False),
        dist.get_rank(),
        start,
        step,
        samples,
    )

    def at(sample: int) -> int:
        calculator.update(sample, consistency_check=False, verbose=False)
        return int(calculator.get())

    return at


def _log_first_plan(args: Namespace, batches: TickBatches, sample: int) -> None:
    """Says what the scheduler did for the first global batch, and what the pipeline looks like."""
    per_micro_batch = batches.batches.layout.samples_per_micro_batch
    schedule = batches.schedule(args.global_batch_size // per_micro_batch)
    micro_batches = batches.micro_batches(sample, schedule.micro_batches)
    # The first tick in which most stages work; only this one is planned here.
    tick = max(schedule.ticks, key=lambda each: sum(work is not None for work in each.work))
    planned = batches.planned_ticks(micro_batches, replace(schedule, ticks=(tick,)))
    summary = describe(planned[0].plans[0], batches.batches.schedule_config, args.distca_backward)
    logger.info("the first plan of the run:\n%s", format_summary(summary))
    warning = warning_of_groups_of_one(args, batches.batches, micro_batches)
    # Warnings of all ranks are shown, and all would say the same.
    if warning is not None and dist.get_rank() == 0:
        logger.warning("%s", warning)
    if schedule.stages == 1:
        return
    usual = most_in_flight_of_1f1b(schedule.micro_batches, schedule.stages, schedule.chunks)
    logger.info(
        "%d ticks (1F1B: %d), in flight on each stage at most %s (1F1B: %s)%s",
        len(schedule.ticks),
        2 * (schedule.micro_batches * schedule.chunks + schedule.stages - 1),
        ", ".join(map(str, schedule.most_in_flight)),
        ", ".join(map(str, usual)),
        f" chunks, of which a stage has {schedule.chunks}" if schedule.chunks > 1 else "",
    )
