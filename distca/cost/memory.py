"""Sizes of the buffers that a plan's core attention runs in: one size, the busiest server's.

They add up what `distca.runtime` takes in each step of a call. What it allocates besides belongs to
the model: the output, the LSE and the gradients of a rank's own rows, whose number is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from distca.cost.rows import RankRows, rank_rows
from distca.cost.volume import (
    AttentionShape,
    BackwardInputs,
    PlanBytes,
    plan_bytes,
)
from distca.plan import Plan
from distca.plan.span import Int64s

ALIGNMENT = 256
"""Alignment of tensors in bytes: that of CUDA's allocator, enough for every vector load."""

FLOAT32_BYTES, INDEX_BYTES = 4, 8

MOST_INDICES = 48
"""Most tensors of row indices that a rank's part of a plan has. Each may be filled up by a row."""

HEADROOM = 0.25
"""Share that the runtime reserves on top of what plans need, so that buffers rarely grow again."""


@dataclass(frozen=True)
class CoreAttentionMemory:
    """Bytes of a rank's buffers, the same on all ranks, so that each knows those of others.

    A slot is one call under way, of a nano-batch.

    Attributes:
        dispatch_send: staging of rows that go to their servers, for each slot.
        dispatch_receive: rows that a server receives, for each slot.
        combine_send: staging of results that go back to the rows' owners, for each slot.
        combine_receive: results that an owner receives, for each slot.
        slot: workspace of a slot, for what its call keeps between steps.
        scratch: workspace for the temporaries of one step.
        indices: row indices, for each nano-batch.
    """

    dispatch_send: int = 0
    dispatch_receive: int = 0
    combine_send: int = 0
    combine_receive: int = 0
    slot: int = 0
    scratch: int = 0
    indices: int = 0

    def total(self, nano_batches: int) -> int:
        """Returns all bytes of a rank, with a slot for each nano-batch."""
        slots = sum(getattr(self, f.name) for f in fields(self)) - self.scratch - self.indices
        return nano_batches * (slots + self.indices) + self.scratch

    def fits(self, room: CoreAttentionMemory) -> bool:
        """Returns whether buffers of the sizes `room` suffice."""
        return all(getattr(self, f.name) <= getattr(room, f.name) for f in fields(self))

    def union(self, other: CoreAttentionMemory) -> CoreAttentionMemory:
        """Sizes that suffice for either."""
        return CoreAttentionMemory(
            *(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )

    def with_headroom(self, share: float) -> CoreAttentionMemory:
        """Returns all sizes enlarged by a share, so that somewhat larger plans fit, too."""
        return CoreAttentionMemory(
            *(int(aligned(int(getattr(self, f.name) * (1 + share)))) for f in fields(self))
        )


def aligned(nbytes: Any) -> Any:
    """Returns the bytes that a tensor of `nbytes` (int or int64 array) takes up in a workspace."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def merge_bytes(members: Int64s, shape: AttentionShape) -> Int64s:
    """Returns the bytes of temporaries for merging partial rows: see `distca.attention.merge`.

    torch allocates the results, sums of the rows that they make, as it does those of kernels.
    """
    weighted = shape.heads * (shape.value_dim + 1) * FLOAT32_BYTES
    return _take(
        members * shape.result_row_bytes, members * weighted, members * shape.lse_row_bytes
    )


def _take(*sizes: Int64s) -> Int64s:
    """Returns the bytes that tensors of these sizes take together."""
    return np.sum([aligned(size) for size in sizes], axis=0)


def plan_memory(
    plan: Plan, shape: AttentionShape, backward: BackwardInputs = "resend"
) -> CoreAttentionMemory:
    """Sizes of the buffers for one layer's core attention, forward and backward.

    Args:
        plan: a valid plan.
        shape: the heads of one tensor-parallel rank.
        backward: source of the kernels' inputs in the backward pass, as in `plan_bytes`.
    """
    return memory_of_rows(rank_rows(plan), plan_bytes(plan, shape, backward), shape)


def memory_of_rows(
    rows_of_ranks: tuple[RankRows, RankRows], sent_bytes: PlanBytes, shape: AttentionShape
) -> CoreAttentionMemory:
    """Sizes of the buffers of a plan, as `plan_memory` has them, from what was counted of it.

    Args:
        rows_of_ranks: the plan's `rank_rows`.
        sent_bytes: its bytes, of both passes.
        shape: the heads of one tensor-parallel rank.
    """
    q, kv = rows_of_ranks
    q_row, k_row, v_row = shape.q_row_bytes, shape.k_row_bytes, shape.v_row_bytes
    q_inputs, kv_row, moved = shape.q_inputs_row_bytes, shape.kv_row_bytes, shape.moved_kv_row_bytes
    expands = shape.kv_rank is not None

    def parts(rows: RankRows, more: Int64s | int, row: int) -> Int64s:
        """Results of all calls, and those that come back."""
        return np.where(rows.computed_alone, 0, (rows.parts + rows.sent + more) * row)

    of_kv = [kv.received * kv_row]
    # Gradients of latents come back instead of those of keys and values.
    fewer = -kv.sent if expands else 0
    gradients = [parts(q, 0, q_row), parts(kv, fewer, k_row), parts(kv, fewer, v_row)]
    if expands:
        of_kv.append(kv.received * moved)
        returned = (shape.kv_rank or 0, shape.rotated_dim)
        gradients += [kv.sent * each * shape.dtype_bytes for each in returned]
    merged = np.maximum(q.of_received.shared, q.of_local.shared)
    slot = [
        _take(q.received * q_row, *of_kv, parts(q, merged, shape.result_row_bytes)),
        _take(q.received * q_inputs, *of_kv, *gradients),
    ]
    scratch = [
        # Rows of messages, one kind after the other; outputs as they merge.
        *(_take(rows) for rows in (q.sent * q_inputs, kv.sent * moved)),
        *(_take(rows) for rows in (q.received * q_row, kv.received * moved)),
        merge_bytes(np.maximum(q.of_received.members, q.of_local.members), shape),
    ]
    if expands:
        expanded = kv.received * shape.expanded_dim * shape.dtype_bytes
        messages = np.maximum(kv.received * moved, q.received * q_row)
        scratch.append(_take(kv.received * k_row, kv.received * v_row, expanded, messages))
    for of_q, of_kv_rows in zip(q.calls, kv.calls, strict=True):
        queries, keys = of_q.taken, of_kv_rows.taken
        of_queries = (
            *[queries * shape.out_row_bytes] * 2,
            queries * q_row,
            queries * shape.lse_row_bytes,
        )
        first = of_q.overwritten * q_inputs, of_kv_rows.overwritten * kv_row
        scratch.append(_take(*of_queries, keys * k_row, keys * v_row, *first))
    return CoreAttentionMemory(
        *_channels(sent_bytes),
        int(np.max(slot, initial=0)),
        int(np.max(scratch, initial=0)),
        int(_indices(q, kv, expands).max()),
    )


def _indices(q: RankRows, kv: RankRows, expands: bool) -> Int64s:
    """Returns the bytes of the row indices of each rank's part: see `distca.runtime.exchange`.

    A row that moves has two in messages, and on the rank that sends it one among the local rows. A
    kernel call has one or more for each row that it gathers, and sums have one; each row that is
    made of parts tells which are its first, and which output is its own. Gradients of latents have
    sums apart from those of keys and values.
    """
    rows = np.zeros_like(q.local)
    for each in (q, kv):
        rows = rows + 3 * each.sent + 2 * each.received
        rows = rows + sum(call.indices for call in each.calls)
        rows = rows + np.where(each.in_order, 0, each.of_received.parts + each.received)
        alone = each.in_order & (each.sent == 0)
        rows = rows + np.where(alone, 0, each.of_local.parts + each.local)
    rows = rows + np.where(q.in_order, 0, q.received)
    rows = rows + np.where(q.in_order & (q.sent == 0), 0, q.local)
    rows = rows + expands * np.where(kv.sent > 0, kv.sent + kv.local, 0)
    for merged in (q.of_received, q.of_local):
        rows = rows + 3 * merged.members + merged.shared
    return aligned((rows + MOST_INDICES) * INDEX_BYTES)  # type: ignore[no-any-return]


def _channels(planned: PlanBytes) -> tuple[int, int, int, int]:
    """Returns the largest bytes that a server sends and receives: to the servers, then to the
    owners."""
    largest = []
    for phases in (("dispatch", "dispatch_backward"), ("combine", "combine_backward")):
        messages = [planned.messages[phase] for phase in phases]
        largest.append(max(int(each.sent().max()) for each in messages))
        largest.append(max(int(each.received().max()) for each in messages))
    return largest[0], largest[1], largest[2], largest[3]
