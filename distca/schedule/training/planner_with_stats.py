"""A planner of global batches that counts what its plans send, need and compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distca.cost.volume import BackwardInputs
from distca.schedule.program import Pass
from distca.schedule.training.global_batch import GlobalBatchPlanner
from distca.schedule.training.memory_bound import MemoryBound
from distca.schedule.training.planned_batch import CountedGlobalBatch, Documents
from distca.schedule.training.tick_schedule import Tick


@dataclass(frozen=True)
class PlannerWithStats:
    """A function from the documents of a global batch to its plans and their figures.

    Attributes:
        planner: planner of global batches.
        calls: calls of core attention in a tick of each direction with each mask, by pass.
        backward: how the backward pass gets its inputs.
        head_parallel: ranks of a server, which share heads.
        bound: bound of a step's memory, with server pools, or None.
    """

    planner: GlobalBatchPlanner
    calls: Mapping[Pass, Sequence[Mapping[Pass, int]]]
    backward: BackwardInputs
    head_parallel: int = 1
    bound: MemoryBound | None = None

    def __call__(self, incoming: Sequence[Documents]) -> CountedGlobalBatch:
        """Plans a global batch: see `GlobalBatchPlanner.plan` for arguments and errors."""
        shape, ranks = self.planner.config.shape, self.head_parallel
        peak = None
        if self.bound is None:
            batch = self.planner.plan(incoming)
        else:
            batch, peak = self.bound.plan(self.planner, incoming)
        return CountedGlobalBatch(
            batch,
            tuple(
                each.bytes_sent(self._calls(each.tick), shape, self.backward, ranks)
                for each in batch.ticks
            ),
            batch.largest_memory(shape, self.backward),
            tuple(
                count * plan.loads()
                for tick, plans, _ in batch.ticks
                if tick.direction == "forward"
                for counts in (self._counts(tick),)
                for plan, count in zip(
                    plans, np.repeat(counts, len(plans) // len(counts)), strict=True
                )
            ),
            self.planner.config.speeds_of(self.planner.world_size),
            sum(each.micro_batches for each in incoming),
            peak,
        )

    def _calls(self, tick: Tick) -> Sequence[Mapping[Pass, int]]:
        """Returns the calls of core attention in a tick with each mask, by pass."""
        calls = self.calls[tick.direction]
        of_all = len(self.planner.masks.of_all_stages.masks)
        if tick.ends_model(self.planner.options.chunks) or of_all == len(calls):
            return calls
        return [*calls[:of_all], *(Counter[Pass]() for _ in calls[of_all:])]

    def _counts(self, tick: Tick) -> Sequence[int]:
        """Returns the layers with each mask that run in a tick."""
        masks = self.planner.masks
        counts, of_all = masks.counts(), len(masks.of_all_stages.masks)
        if tick.ends_model(self.planner.options.chunks):
            return counts
        return [*counts[:of_all], *(0 for _ in counts[of_all:])]
