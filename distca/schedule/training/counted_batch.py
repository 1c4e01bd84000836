"""A planned global batch with the figures of its plans: the value that a planner gives to ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distca.cost.memory import CoreAttentionMemory
from distca.cost.volume import BackwardInputs
from distca.plan.span import Floats, Int64s
from distca.schedule.program import Pass
from distca.schedule.training.global_batch import (
    Documents,
    GlobalBatchPlanner,
    PlannedGlobalBatch,
)


@dataclass(frozen=True)
class CountedGlobalBatch:
    """A planned global batch, with figures of its plans that are the same on every rank.

    Attributes:
        batch: plans of the micro-batches and ticks.
        bytes_sent: bytes that each server sends in each tick, int64 `[servers]` by phase.
        memory: memory in which each of the plans can run.
        forward_loads: loads of the servers in each nano-batch of the forward ticks, `[servers]`,
            over the layers of the masks' pattern.
    """

    batch: PlannedGlobalBatch
    bytes_sent: tuple[dict[str, Int64s], ...]
    memory: CoreAttentionMemory
    forward_loads: tuple[Int64s | Floats, ...]


@dataclass(frozen=True)
class PlannerWithStats:
    """A function from the documents of a global batch to its plans and their figures.

    Attributes:
        planner: planner of global batches.
        calls: calls of core attention in a tick of each direction with each mask, by pass.
        backward: how the backward pass gets its inputs.
    """

    planner: GlobalBatchPlanner
    calls: Mapping[Pass, Sequence[Mapping[Pass, int]]]
    backward: BackwardInputs

    def __call__(self, incoming: Sequence[Documents]) -> CountedGlobalBatch:
        """Plans a global batch: see `GlobalBatchPlanner.plan` for arguments and errors."""
        shape = self.planner.config.shape
        batch, counts = self.planner.plan(incoming), self.planner.masks.counts()
        return CountedGlobalBatch(
            batch,
            tuple(
                each.bytes_sent(self.calls[each.tick.direction], shape, self.backward)
                for each in batch.ticks
            ),
            batch.largest_memory(shape, self.backward),
            tuple(
                count * plan.loads()
                for tick, plans, _ in batch.ticks
                if tick.direction == "forward"
                for plan, count in zip(
                    plans, np.repeat(counts, len(plans) // len(counts)), strict=True
                )
            ),
        )
