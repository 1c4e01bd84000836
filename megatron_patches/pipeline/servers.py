"""The process groups that exchange with each other, and the numbers of their attention servers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from distca.plan.span import Int64s
from distca.runtime.shared_heads import SharedHeads
from distca.transport import new_exchange_group
from distca.transport.collective import MAX_CTAS
from distca.transport.shared_segments import machine_id
from megatron_patches.batches.layouts import PipelineLayout
from megatron_patches.flags.config import DistcaConfig, SchedulingConfig
from megatron_patches.flags.parallel import ParallelSizes
from megatron_patches.pipeline.processes import Control, Place, Processes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Servers:
    """The attention servers as one of them sees them.

    Attributes:
        group: process group of the servers, those with this process's heads.
        layout: stages and numbers of the servers.
        control: control of the dedicated servers, or None.
        heads: ranks that share heads with this one, or None.
    """

    group: dist.ProcessGroup
    layout: PipelineLayout
    control: Control | None
    heads: SharedHeads | None = None


def find_servers(
    config: DistcaConfig,
    sizes: ParallelSizes,
    device: torch.device,
    processes: Processes | None = None,
) -> Servers:
    """Finds the servers that exchange with this process, and warns of distances. Collective.

    Args:
        config: our flags.
        sizes: numbers of ranks.
        device: device of the model.
        processes: processes of a job with dedicated servers, or None.
    """
    if processes is None or not processes.serves_only:
        machines: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(machines, machine_id())
        if dist.get_rank() == 0:
            warn_of_distances(config.scheduling, sizes.tensor, machines)
    return connect_servers(
        device,
        processes,
        chunks=sizes.chunks,
        head_parallel=sizes.head_parallel,
        timeout=sizes.timeout,
        max_ctas=config.transport.nccl_max_ctas,
    )


def connect_servers(
    device: torch.device,
    processes: Processes | None = None,
    *,
    chunks: int = 1,
    head_parallel: int = 1,
    timeout: timedelta | None = None,
    max_ctas: int = MAX_CTAS,
) -> Servers:
    """Numbers the attention servers, and makes the groups in which they exchange. Collective.

    Args:
        device: device of the model.
        processes: processes of a job with dedicated servers, or None.
        chunks: number of model chunks (virtual stages) of each pipeline stage.
        head_parallel: data-parallel ranks of a server, which share heads; 1 with dedicated servers.
        timeout: time limit of an exchange; None: the backend's default.
        max_ctas: as for `distca.transport.collective.nccl_options`, where the backend is NCCL.
    """
    if processes is not None and processes.serves_only:
        places, index = processes.share_places(None), processes.tensor_parallel_rank
        group = processes.exchange_group(places, index, max_ctas)
        table = server_table(places, index)
        number = int(table.size) + processes.dedicated_number
        layout = PipelineLayout(None, chunks, table, number, processes.dedicated_servers)
        return Servers(group, layout, Control(group, device))
    rank = parallel_state.get_data_parallel_rank()
    place = (
        parallel_state.get_tensor_model_parallel_rank() * head_parallel + rank % head_parallel,
        parallel_state.get_pipeline_model_parallel_rank(),
        rank // head_parallel,
    )
    index, stage, of_stage = place
    places = [place] * dist.get_world_size()
    dist.all_gather_object(places, place)
    table = server_table(places, index)
    number = int(table[stage, of_stage])
    if processes is None:
        # Groups of their own, so that exchanges are never ordered among other collectives.
        group = _group_of_equals([each for each, *_ in places], timeout, max_ctas)
        heads = None
        if head_parallel > 1:
            # Parts of a tensor-parallel rank's heads lie together.
            servers = [(part // head_parallel, *server) for part, *server in places]
            heads = SharedHeads(_group_of_equals(servers, timeout, max_ctas))
        return Servers(group, PipelineLayout(stage, chunks, table, number), None, heads)
    group = processes.exchange_group(processes.share_places(places), index, max_ctas)
    layout = PipelineLayout(stage, chunks, table, number, processes.dedicated_servers)
    return Servers(group, layout, Control(group, device))


def _group_of_equals(
    keys: Sequence[object], timeout: timedelta | None, max_ctas: int
) -> dist.ProcessGroup:
    """Makes a process group of all ranks with the same key, for each key; returns this rank's.
    Collective.

    Args:
        keys: key of each process.
        timeout, max_ctas: as for `connect_servers`.
    """
    mine = None
    for key in dict.fromkeys(keys):
        ranks = [rank for rank, other in enumerate(keys) if other == key]
        group = new_exchange_group(ranks, timeout, max_ctas)
        mine = group if dist.get_rank() in ranks else mine
    assert mine is not None, "this process is of one of them"
    return mine


def warn_of_distances(
    scheduling: SchedulingConfig, tensor_parallel_size: int, machines: Sequence[str]
) -> None:
    """Warns where the flags let the scheduler take all ranks for equally far, and they are not.

    Args:
        scheduling: scheduler and links.
        tensor_parallel_size: number of tensor-parallel ranks.
        machines: machine of each process.
    """
    shared = max(Counter(machines).values())
    several = len(set(machines)) > 1 and shared > tensor_parallel_size
    if several and scheduling.scheduler == "tiles" and scheduling.gpus_per_node == 1:
        logger.warning(
            "bytes inside a machine are taken to be as dear as those between machines: give "
            "--distca-gpus-per-node %d",
            shared,
        )


def server_table(places: list[Place], part: int) -> Int64s:
    """Numbers the servers that compute the same part of the heads: see `PipelineLayout.servers`.

    Args:
        places: places of the processes with a model.
        part: number of the part.

    Returns:
        Server numbers in the order of the processes, int64 `[stages, servers of a stage]`.
    """
    mine = [place[1:] for place in places if place[0] == part]
    stages, ranks = (1 + max(column) for column in zip(*mine, strict=True))
    table = np.empty((stages, ranks), dtype=np.int64)
    for server, (stage, rank) in enumerate(mine):
        table[stage, rank] = server
    return table
