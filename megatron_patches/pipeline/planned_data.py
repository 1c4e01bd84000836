"""The data of a run with `--distca`: what its splits share, and the planned iterator of each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from distca.runtime import CoreAttention
from distca.schedule import GlobalBatchPlanner, PlannerProcess, ScheduleConfig
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.planned import PlannedReader
from megatron_patches.batches.planned_iterator import PlannedIterator
from megatron_patches.batches.stream import TokenStream
from megatron_patches.batches.ticks import TickMaker
from megatron_patches.flags.batch_sizes import micro_batches_by_sample, samples_for_evaluation
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import masks_of_a_chunk
from megatron_patches.flags.planning import linear_work, schedule_config
from megatron_patches.model.recompute import groups_of_layers
from megatron_patches.pipeline.data_iterators import TRAIN
from megatron_patches.pipeline.processes import Processes
from megatron_patches.pipeline.servers import Servers, find_servers
from megatron_patches.pipeline.transports import build_core_attention


@dataclass(frozen=True)
class PlannedData:
    """What the splits of a run with `--distca` share.

    Attributes:
        config: our flags.
        args: Megatron-LM's arguments.
        windows: windows and ranks.
        device: device of the model.
        servers: attention servers that exchange with this process.
        core_attention: runtime of the plans.
        scheduling: costs and links by which plans are made.
    """

    config: DistcaConfig
    args: Namespace
    windows: WindowLayout
    device: torch.device
    servers: Servers
    core_attention: CoreAttention
    scheduling: ScheduleConfig

    @staticmethod
    def start(
        config: DistcaConfig,
        args: Namespace,
        windows: WindowLayout,
        device: torch.device,
        processes: Processes | None = None,
    ) -> PlannedData:
        """Connects the attention servers. Collective.

        Args:
            config: our flags.
            args: Megatron-LM's arguments.
            windows: windows and ranks.
            device: device of the model.
            processes: processes of a job with dedicated servers; None: there are none.
        """
        servers = find_servers(config, args, device, processes)
        return PlannedData(
            config,
            args,
            windows,
            device,
            servers,
            build_core_attention(config, args, servers.group, device),
            schedule_config(config, args, servers.layout.world_size),
        )

    @cached_property
    def micro_batches(self) -> Callable[[int], int]:
        """Function from a sample of the training split to the micro-batches of the global batch
        that starts there."""
        return micro_batches_by_sample(self.args)

    def maker(self, stream: TokenStream, forward_only: bool) -> TickMaker:
        """Makes the maker of a split's ticks."""
        args, pipeline = self.args, self.servers.layout
        planner = GlobalBatchPlanner(
            pipeline.servers,
            self.scheduling,
            self.config.execution_options(pipeline.chunks, forward_only),
            masks_of_a_chunk(args),
            pipeline.dedicated,
            linear_work=linear_work(args),
        )
        shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
        layers = args.num_layers // (pipeline.stages * pipeline.chunks)
        return TickMaker(
            PlannedReader(stream, self.windows, planner, shards),
            pipeline,
            groups_of_layers(layers, args),
            self.core_attention,
        )

    def iterator(self, stream: TokenStream, number: int, first_sample: int) -> PlannedIterator:
        """Makes the iterator over a split's ticks, planned by a process of its own.

        Args:
            stream: token stream of the split.
            number: number of the iterator, as for `DataIterators.numbered`.
            first_sample: sample of the stream.
        """
        training, control = number == TRAIN, self.servers.control
        maker = self.maker(stream, forward_only=not training)
        evaluated = samples_for_evaluation(self.args) // self.windows.samples_per_micro_batch
        return PlannedIterator(
            maker,
            first_sample,
            self.micro_batches if training else lambda _: evaluated,
            self.device,
            PlannerProcess(maker.planner()),
            None if control is None else partial(control.announce, number),
            self.args.apply_rope_fusion,
        )

    def close(self) -> None:
        """Frees what the transport holds; no tick may follow."""
        self.core_attention.transport.close()
