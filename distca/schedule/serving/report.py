"""Figures of a plan's steps: what travels in each, and how evenly they are shared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.steps import step_bytes
from distca.cost.volume import AttentionShape
from distca.plan import SteppedPlan
from distca.plan.plan import max_over_mean


@dataclass(frozen=True)
class StepSummary:
    """Figures of a step of a plan, in one layer.

    Attributes:
        tasks: tasks of the step.
        query_rows, key_rows: rows that travel to servers before it; where some are dropped those
            of a key-value head on average.
        bytes_dispatched, bytes_combined: bytes of these rows, and of the outputs that return.
        bytes_max_sent, bytes_max_received: most bytes of both that a rank sends, and receives.
        load_max_over_mean: pairs of the busiest server over the mean.
        kept_pairs: share of the visible pairs that is computed.
        kept_keys: share of the keys that is sent, of those that would be if none were dropped.
    """

    tasks: int
    query_rows: int
    key_rows: int
    bytes_dispatched: int
    bytes_combined: int
    bytes_max_sent: int
    bytes_max_received: int
    load_max_over_mean: float
    kept_pairs: float = 1.0
    kept_keys: float = 1.0


def describe_steps(stepped: SteppedPlan, shape: AttentionShape) -> tuple[StepSummary, ...]:
    """Computes the figures of each step.

    Args:
        stepped: a valid plan.
        shape: heads of one tensor-parallel rank.
    """
    steps, plan, tasks = [], stepped.plan, stepped.plan.tasks
    visible, kept = tasks.pairs(plan.mask), stepped.kept_pairs()
    pairs, heads = kept.sum(axis=1), kept.shape[1]
    for number, moved in enumerate(step_bytes(stepped, shape)):
        mine = stepped.step == number
        loads = np.zeros(plan.world_size, dtype=np.int64)
        np.add.at(loads, tasks.server[mine], pairs[mine])
        segments, messages = stepped.step_segments[number], moved.messages
        keys = whole = int(segments.kv.moved()[2].sum())
        if stepped.drops:
            keys = round(int(stepped.kept_keys.of_step(number).counts.sum()) / heads)
        steps.append(
            StepSummary(
                tasks=int(mine.sum()),
                query_rows=int(segments.q.moved()[2].sum()),
                key_rows=keys,
                bytes_dispatched=int(messages["dispatch"].sizes.sum()),
                bytes_combined=int(messages["combine"].sizes.sum()),
                bytes_max_sent=int(moved.sent().max()),
                bytes_max_received=int(moved.received().max()),
                load_max_over_mean=max_over_mean(loads),
                kept_pairs=float(pairs[mine].sum() / (heads * visible[mine].sum())),
                kept_keys=keys / whole if whole else 1.0,
            )
        )
    return tuple(steps)
