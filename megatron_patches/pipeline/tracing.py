"""A timeline of some iterations, which one rank writes: `--distca-trace`."""

from __future__ import annotations

import logging

import torch.distributed as dist
from megatron.core import parallel_state

from distca.runtime import Trace
from distca.timeline import TimelineEvent, write_trace
from megatron_patches.batches.layouts import PipelineLayout
from megatron_patches.flags.config import TraceConfig

logger = logging.getLogger(__name__)


class Tracing:
    """A recorder of training iterations, which writes the file after the last of them.

    Args:
        config: file and iterations.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._iteration = 0

    def starts(self, trace: Trace, forward_only: bool) -> bool:
        """Begins an iteration (evaluations don't count), and returns whether it is recorded."""
        if forward_only:
            return False
        self._iteration += 1
        trace.recording = self._config.first <= self._iteration <= self._config.last
        return trace.recording

    def ends(self, trace: Trace, layout: PipelineLayout) -> None:
        """Ends a recorded iteration; after the last one rank 0 writes the file. Collective."""
        trace.recording = False
        if self._iteration < self._config.last:
            return
        rank = dist.get_rank()
        data, tensor = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        name = (
            f"rank {rank}: stage {layout.stage}, data {data}, tensor {tensor}, "
            f"server {layout.server}"
        )
        mine = (name, trace.take(rank))
        everyones: list[tuple[str, list[TimelineEvent]]] = [mine] * dist.get_world_size()
        dist.gather_object(mine, everyones if rank == 0 else None)
        if rank == 0:
            write_trace(self._config.path, everyones)
            logger.info("wrote the timeline %s: open it at ui.perfetto.dev", self._config.path)
