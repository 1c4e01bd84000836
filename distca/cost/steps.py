"""Bytes and buffers of the steps of inference's plans, which run forward only."""

from __future__ import annotations

import numpy as np

from distca.cost.memory import (
    INDEX_BYTES,
    MOST_INDICES,
    CoreAttentionMemory,
    aligned,
    merge_bytes,
)
from distca.cost.volume import FORWARD_PHASES, AttentionShape, Messages, PlanBytes, rows_by_pair
from distca.plan import SteppedPlan

STEP_SLOTS = 2
"""Slots that steps take in turn: the rows of one are computed while those of the next arrive."""


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


def step_memory(stepped: SteppedPlan, shape: AttentionShape) -> CoreAttentionMemory:
    """Sizes of the buffers for one layer's core attention, those of its largest step.

    Kernels read keys where they arrived, so there is no memory for them but the channels'. What a
    call takes besides, for its outputs, is as large as those of the model's other layers.

    Args:
        stepped: a valid plan.
        shape: the heads of one tensor-parallel rank.
    """
    largest = []
    steps = step_bytes(stepped, shape)
    for phase in FORWARD_PHASES:
        messages = [step.messages[phase] for step in steps]
        largest.append(max(int(each.sent().max()) for each in messages))
        largest.append(max(int(each.received().max()) for each in messages))
    return CoreAttentionMemory(*largest)


def decode_memory(sequences: int, world_size: int, shape: AttentionShape) -> CoreAttentionMemory:
    """Sizes of the buffers for one layer's core attention of one query of each sequence.

    They suffice for every decode step of that many sequences, so they are worked out once: one rank
    may own all queries, and send them to all others; or serve all.

    Args:
        sequences: most sequences that a step feeds.
        world_size: ranks.
        shape: heads of a layer on each rank.
    """
    q_row, result_row = shape.q_row_bytes, shape.result_row_bytes
    sent = sequences * (world_size - 1)
    # Partial outputs of the kernels, those that come back, and the merged ones.
    parts = 2 * sequences + sent
    members = np.array(sequences * world_size)
    # Of the queries that a kernel takes, at most half are gathered apart, and overwrite others. All
    # have one more index, for kernels that take both memories at once.
    taken = aligned(sequences * q_row) + aligned(sequences // 2 * q_row)
    indices = 3 * sent + 2 * sequences + 4 * sequences + parts + 3 * int(members) + sequences
    return CoreAttentionMemory(
        dispatch_send=sent * q_row,
        dispatch_receive=sequences * q_row,
        combine_send=sequences * result_row,
        combine_receive=sent * result_row,
        slot=int(aligned(sequences * q_row) + aligned(parts * result_row)),
        scratch=int(max(taken, merge_bytes(members, shape))),
        indices=int(aligned((indices + MOST_INDICES) * INDEX_BYTES)),
    )
