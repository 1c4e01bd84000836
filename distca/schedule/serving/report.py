"""Figures of a plan's steps: what travels in each, and how evenly they are shared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.volume import AttentionShape, step_bytes
from distca.plan import Plan
from distca.plan.plan import max_over_mean


@dataclass(frozen=True)
class StepSummary:
    """Figures of a step of a plan, in one layer.

    Attributes:
        tasks: tasks of the step.
        query_rows, key_rows: rows that travel to servers before it.
        bytes_to_servers, bytes_to_owners: bytes of these rows, and of the outputs that return.
        bytes_max_sent, bytes_max_received: most bytes of both that a rank sends, and receives.
        load_max_over_mean: pairs of the busiest server over the mean.
    """

    tasks: int
    query_rows: int
    key_rows: int
    bytes_to_servers: int
    bytes_to_owners: int
    bytes_max_sent: int
    bytes_max_received: int
    load_max_over_mean: float


def describe_steps(plan: Plan, shape: AttentionShape) -> tuple[StepSummary, ...]:
    """Computes the figures of each step.

    Args:
        plan: a valid plan.
        shape: heads of one tensor-parallel rank.
    """
    found = []
    pairs = plan.tasks.pairs(plan.mask)
    for number, moved in enumerate(step_bytes(plan, shape)):
        mine = plan.tasks.step == number
        loads = np.zeros(plan.world_size, dtype=np.int64)
        np.add.at(loads, plan.tasks.server[mine], pairs[mine])
        segments, messages = plan.step_segments[number], moved.messages
        found.append(
            StepSummary(
                tasks=int(mine.sum()),
                query_rows=int(segments.q.moved()[2].sum()),
                key_rows=int(segments.kv.moved()[2].sum()),
                bytes_to_servers=int(messages["dispatch"].sizes.sum()),
                bytes_to_owners=int(messages["return"].sizes.sum()),
                bytes_max_sent=int(moved.sent().max()),
                bytes_max_received=int(moved.received().max()),
                load_max_over_mean=max_over_mean(loads),
            )
        )
    return tuple(found)
