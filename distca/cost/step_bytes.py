"""Bytes of the steps of inference's plans, which run forward only."""

from __future__ import annotations

import numpy as np

from distca.cost.volume import FORWARD_PHASES, AttentionShape, Messages, PlanBytes, rows_by_pair
from distca.plan import SteppedPlan


def step_bytes(stepped: SteppedPlan, shape: AttentionShape) -> tuple[PlanBytes, ...]:
    """Counts the bytes of each step of one layer's core attention.

    Where tasks drop rows, those that stay travel as rows of single heads.

    Args:
        stepped: a valid plan.
        shape: the heads of one tensor-parallel rank.

    Raises:
        ValueError: the plan drops rows of another number of key-value heads.
    """
    if stepped.drops:
        return tuple(_kept_bytes(stepped, shape, step) for step in range(stepped.steps))
    ranks, found = stepped.plan.world_size, []
    shape = shape.scattered(stepped.plan.head_groups)
    for q, kv, outputs in stepped.step_segments:
        source, server, q_rows, kv_rows = rows_by_pair(q, kv, ranks)
        inputs = q_rows * shape.q_row_bytes + kv_rows * shape.kv_row_bytes
        owner, computed_by, rows = outputs.moved()
        results = rows * shape.result_row_bytes
        found.append(
            PlanBytes(
                {
                    "dispatch": Messages(source, server, inputs, ranks),
                    "combine": Messages(computed_by, owner, results, ranks),
                }
            )
        )
    return tuple(found)


def stepped_bytes(stepped: SteppedPlan, shape: AttentionShape) -> PlanBytes:
    """Counts the bytes of one layer's core attention, those of all steps; see `step_bytes`."""
    each = [step.messages for step in step_bytes(stepped, shape)]
    return PlanBytes(
        {phase: Messages.added([step[phase] for step in each]) for phase in FORWARD_PHASES}
    )


def _kept_bytes(stepped: SteppedPlan, shape: AttentionShape, step: int) -> PlanBytes:
    kept, ranks = stepped.kept_keys.of_step(step), stepped.plan.world_size
    if kept.counts.shape[1] != shape.kv_heads:
        raise ValueError(
            f"the plan keeps rows of {kept.counts.shape[1]} key-value heads, but there are "
            f"{shape.kv_heads}"
        )
    owner, server, rows = kept.moved()
    moved = Messages(owner, server, rows * shape.kv_head_bytes, ranks)
    nothing = np.zeros(0, dtype=np.int64)
    back = Messages(nothing, nothing, nothing, ranks)
    return PlanBytes({"dispatch": moved, "combine": back})
