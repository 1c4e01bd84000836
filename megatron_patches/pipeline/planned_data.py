"""The data of a run with `--distca`: what its splits share, and the planned iterator of each."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from distca.schedule import GlobalBatchPlanner, MemoryBound, PlannerProcess
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.planned import PlannedReader
from megatron_patches.batches.resuming import documents_cross_windows, warn_of_cuts
from megatron_patches.batches.stream import TokenStream
from megatron_patches.batches.ticks import PlannedIterator, RankRuntime, TickMaker
from megatron_patches.flags.batch_sizes import BatchSizes
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.flags.planning import PlannerConfig
from megatron_patches.flags.step_memory import step_memory
from megatron_patches.model.features import features_of
from megatron_patches.pipeline.data_iterators import TRAIN
from megatron_patches.pipeline.processes import Processes
from megatron_patches.pipeline.servers import Servers, find_servers
from megatron_patches.pipeline.transports import build_core_attention


@dataclass(frozen=True)
class PlannedData:
    """What the splits of a run with `--distca` share.

    Attributes:
        planning: what plans are made by.
        windows: windows and ranks.
        device: device of the model.
        servers: attention servers that exchange with this process.
        runtime: what this rank runs ticks with.
        micro_batches_at: function from a sample of the training split to the number of
            micro-batches of the global batch that starts there.
        evaluated: number of micro-batches of a global batch of an evaluation.
        fused_rotary: as for `MicroBatch.to`.
        cuts_at_windows: as for `PlannedReader`.
        bound: bound of a training step's memory, with server pools, or None.
        prediction_layers: as for `PlannedReader`.
    """

    planning: PlannerConfig
    windows: WindowLayout
    device: torch.device
    servers: Servers
    runtime: RankRuntime
    micro_batches_at: Callable[[int], int]
    evaluated: int
    fused_rotary: bool
    cuts_at_windows: bool = True
    bound: MemoryBound | None = None
    prediction_layers: int = 0

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
            processes: processes of a job with dedicated servers, or None.
        """
        if windows.data_parallel_rank == args.rank == 0:
            warn_of_cuts(config, args)
        sizes = ParallelSizes.from_args(args, config.head_parallel)
        batches = BatchSizes.from_args(args)
        servers = find_servers(config, sizes, device, processes)
        planning = PlannerConfig.from_args(config, args, servers.layout.world_size)
        shape, features = planning.schedule.shape, features_of(args)
        return PlannedData(
            planning=planning,
            windows=windows,
            device=device,
            servers=servers,
            runtime=RankRuntime(
                servers.layout,
                build_core_attention(
                    config,
                    (shape.head_dim, shape.value_dim),
                    servers.group,
                    device,
                    sizes.timeout,
                    None if features is None else features.score_cap,
                ),
                shape,
                planning.masks,
                planning.layer_groups,
                servers.heads,
            ),
            micro_batches_at=batches.micro_batches_by_sample(),
            evaluated=batches.evaluated // windows.samples_per_micro_batch,
            fused_rotary=args.apply_rope_fusion,
            cuts_at_windows=not documents_cross_windows(config, args),
            bound=_memory_bound(config, args, planning, device),
            prediction_layers=(args.mtp_num_layers or 0)
            if servers.layout.stage == servers.layout.stages - 1
            else 0,
        )

    def reader(self, stream: TokenStream, forward_only: bool) -> PlannedReader:
        """Makes the reader of a split's micro-batches, with their planner.

        Raises:
            ValueError: a document of the training split needs more memory than a GPU may fill.
        """
        planning, pipeline = self.planning, self.servers.layout
        planner = GlobalBatchPlanner(
            pipeline.servers,
            planning.schedule,
            planning.options(forward_only),
            planning.masks,
            pipeline.dedicated,
            linear_work=planning.linear_work,
            row_multiple=planning.sequence_shards * planning.head_parallel,
        )
        bound = None if forward_only else self.bound
        if bound is not None:
            lengths = np.diff(stream.offsets)
            if self.cuts_at_windows:
                lengths = np.minimum(lengths, self.windows.window_tokens)
            bound.check(planner, lengths)
        return PlannedReader(
            stream,
            self.windows,
            planner,
            planning.sequence_shards,
            planning.head_parallel,
            self.cuts_at_windows,
            bound,
            self.prediction_layers,
        )

    def maker(self, stream: TokenStream, forward_only: bool) -> TickMaker:
        """Makes the maker of a split's ticks."""
        return TickMaker(self.reader(stream, forward_only), self.runtime)

    def iterator(self, stream: TokenStream, number: int, first_sample: int) -> PlannedIterator:
        """Makes the iterator over a split's ticks, planned by a process of its own.

        Args:
            stream: token stream of the split.
            number: number of the iterator, as for `DataIterators.numbered`.
            first_sample: sample of the stream.
        """
        training, control = number == TRAIN, self.servers.control
        maker = self.maker(stream, forward_only=not training)
        return PlannedIterator(
            maker,
            first_sample,
            self.micro_batches_at if training else lambda _: self.evaluated,
            self.device,
            PlannerProcess(maker.planner()),
            None if control is None else partial(control.announce, number),
            self.fused_rotary,
        )

    def close(self) -> None:
        """Frees what the transport holds; no tick may follow."""
        self.runtime.core_attention.transport.close()


def _memory_bound(
    config: DistcaConfig, args: Namespace, planning: PlannerConfig, device: torch.device
) -> MemoryBound | None:
    """Returns the bound of a training step's memory, the same on all ranks. Collective.

    Without pools micro-batches are equal, and their number is given.
    """
    if config.pool_size is None:
        return None
    step = step_memory(config, args, planning.schedule.shape, planning.layer_groups)
    if config.memory_gb is not None:
        flag = f"--distca-memory-gb {config.memory_gb:g}"
        return MemoryBound(1e9 * config.memory_gb, step, flag)
    if device.type != "cuda":
        return None
    # What torch holds and what nobody does: the rest is of CUDA, NCCL and other processes.
    free, _ = torch.cuda.mem_get_info(device)
    smallest = torch.tensor(free + torch.cuda.memory_reserved(device), device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return MemoryBound(float(smallest.item()), step, "a GPU")
