"""Sizes of the buffers that a plan's core attention runs in: one size, the busiest server's.

They add up what `distca.runtime` takes in each step of a call. What it allocates besides belongs to
the model: the output, the LSE and the gradients of a rank's own rows, whose number is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from distca.cost.partial_rows import PartialRows, at_owners, on_servers
from distca.cost.volume import (
    LSE_BYTES,
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

HEADROOM = 0.25
"""Share that the runtime reserves on top of what plans need, so that buffers rarely grow again."""


@dataclass(frozen=True)
class CoreAttentionMemory:
    """Bytes of a rank's buffers, the same on all ranks, so that each knows those of others.

    A slot is one call under way: a head group of a nano-batch.

    Attributes:
        to_servers_send: staging of rows that go to their servers, for each slot.
        to_servers_receive: rows that a server receives, for each slot.
        to_owners_send: staging of results that go back to the rows' owners, for each slot.
        to_owners_receive: results that an owner receives, for each slot.
        slot: workspace of a slot, for what its call keeps between steps.
        scratch: workspace for the temporaries of one step.
        indices: row indices, for each nano-batch.
    """

    to_servers_send: int = 0
    to_servers_receive: int = 0
    to_owners_send: int = 0
    to_owners_receive: int = 0
    slot: int = 0
    scratch: int = 0
    indices: int = 0

    def total(self, nano_batches: int, head_groups: int = 1) -> int:
        """All bytes of a rank, with a slot for each head group of each nano-batch."""
        slots = sum(getattr(self, f.name) for f in fields(self)) - self.scratch - self.indices
        return nano_batches * (head_groups * slots + self.indices) + self.scratch

    def fits(self, room: CoreAttentionMemory) -> bool:
        """Whether buffers of the sizes `room` suffice."""
        return all(getattr(self, f.name) <= getattr(room, f.name) for f in fields(self))

    def union(self, other: CoreAttentionMemory) -> CoreAttentionMemory:
        """Sizes that suffice for either."""
        return CoreAttentionMemory(
            *(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        )

    def with_headroom(self, share: float) -> CoreAttentionMemory:
        """All sizes enlarged by a share, so that somewhat larger plans fit, too."""
        return CoreAttentionMemory(
            *(int(aligned(int(getattr(self, f.name) * (1 + share)))) for f in fields(self))
        )


def aligned(nbytes: Any) -> Any:
    """Bytes that a tensor of `nbytes` (int or int64 array) takes up in a workspace."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def merge_bytes(members: Int64s, shape: AttentionShape) -> Int64s:
    """Bytes of temporaries for merging so many partial rows: see `distca.attention.merge`.

    torch allocates the results, sums of the rows that they make, as it does those of kernels.
    """
    return _take(
        members * (_float32(shape, shape.q_row_bytes) + shape.lse_row_bytes),
        *[members * shape.lse_row_bytes] * 2,
        members * shape.q_row_bytes,
    )


def _float32(shape: AttentionShape, row_bytes: int) -> int:
    return row_bytes * FLOAT32_BYTES // shape.dtype_bytes


def _take(*sizes: Int64s) -> Int64s:
    """Bytes that tensors of these sizes take together."""
    return np.sum([aligned(size) for size in sizes], axis=0)


def plan_memory(
    plan: Plan, shape: AttentionShape, backward: BackwardInputs = "resend"
) -> CoreAttentionMemory:
    """Sizes of the buffers for one layer's core attention, forward and backward.

    Args:
        plan: a valid plan.
        shape: the heads of one tensor-parallel rank, or of a head group of it.
        backward: source of the kernels' inputs in the backward pass, as in `plan_bytes`.
    """
    segments = plan.q_segments, plan.kv_segments
    sent, received = zip(*(each.moved_per_rank(plan.world_size) for each in segments), strict=True)
    own = plan.own_tokens_per_rank(), plan.placement.tokens_per_rank()
    served = tuple(o + more for o, more in zip(own, received, strict=True))
    q_row, lse_row, k_row = shape.q_row_bytes, shape.lse_row_bytes, shape.kv_row_bytes // 2
    float32_q, float32_k = _float32(shape, q_row), _float32(shape, k_row)
    assert LSE_BYTES == FLOAT32_BYTES

    def inputs(rows: tuple[Int64s, ...]) -> tuple[Int64s, ...]:
        return rows[0] * q_row, rows[1] * k_row, rows[1] * k_row

    def gradients(rows: tuple[Int64s, ...]) -> tuple[Int64s, ...]:
        """The output's gradient, the output and its LSE."""
        return rows[0] * q_row, rows[0] * q_row, rows[0] * lse_row

    def float32_inputs(rows: tuple[Int64s, ...]) -> tuple[Int64s, ...]:
        return rows[0] * float32_q, rows[1] * float32_k, rows[1] * float32_k

    computed, finished = on_servers(plan), at_owners(plan)
    # Outputs of served rows, and later the parts of a rank's own rows and what is merged of them.
    outputs = np.maximum(served[0], np.where(sent[0] > 0, own[0] + sent[0] + finished.shared, 0))
    slot = [
        _take(*inputs(served), outputs * q_row, outputs * lse_row),
        _take(*gradients(served), *inputs(served), *float32_inputs(served)) + _take(*inputs(sent)),
    ]
    of_calls = computed.parts + computed.shared
    scratch = [
        # Rows to send; gradients to send back; outputs of all calls and of all servers, as they
        # merge; gradients that come back.
        _take(*gradients(sent), *inputs(sent)),
        _take(*inputs(received)),
        _take(of_calls * q_row, of_calls * lse_row) + merge_bytes(computed.members, shape),
        merge_bytes(finished.members, shape),
        *(_take(each) for each in float32_inputs(sent)),
    ]
    for rows in _rows_of_calls(plan):
        scratch += [
            _take(*inputs(rows)),
            _take(*gradients(rows), *inputs(rows), *float32_inputs(rows)),
        ]
    return CoreAttentionMemory(
        *_channels(plan_bytes(plan, shape, backward)),
        int(np.max(slot, initial=0)),
        int(np.max(scratch, initial=0)),
        int(_indices(plan, (sent, received), served[0], own[0], computed, finished).max()),
    )


def _indices(
    plan: Plan,
    moved: tuple[tuple[Int64s, Int64s], tuple[Int64s, Int64s]],
    served: Int64s,
    own: Int64s,
    computed: PartialRows,
    finished: PartialRows,
) -> Int64s:
    """Bytes of the row indices of each rank's part: see `distca.runtime.exchange`.

    A row that moves has two in messages, and on the rank that sends it one among the local rows and
    two as a gradient that comes back. A kernel call has one for each of its rows.
    """
    (sent_q, sent_kv), (received_q, received_kv) = moved
    # The first of each row's gradients makes a third.
    rows = 6 * (sent_q + sent_kv) + 2 * (received_q + received_kv)
    for q_rows, kv_rows in _rows_of_calls(plan):
        rows = rows + q_rows + kv_rows
    rows = rows + served + np.where(sent_q > 0, own, 0)
    for each in (computed, finished):
        rows = rows + 3 * each.members + each.shared
    return aligned(rows * INDEX_BYTES)  # type: ignore[no-any-return]


def _rows_of_calls(plan: Plan) -> list[tuple[Int64s, Int64s]]:
    """Query and key rows of each server's kernel call of either task shape."""
    calls = []
    for causal in (False, True):
        tasks = plan.tasks[plan.tasks.ends_on_diagonal == causal]
        q_rows, kv_rows = (np.zeros(plan.world_size, dtype=np.int64) for _ in range(2))
        np.add.at(q_rows, tasks.server, tasks.q_end - tasks.q_start)
        np.add.at(kv_rows, tasks.server, tasks.kv_end - tasks.kv_start)
        calls.append((q_rows, kv_rows))
    return calls


def _channels(planned: PlanBytes) -> tuple[int, int, int, int]:
    """Largest bytes that a server sends and receives: to the servers, then to the owners."""
    largest = []
    for phases in (("dispatch", "dispatch_backward"), ("return", "return_backward")):
        messages = [planned.messages[phase] for phase in phases]
        largest.append(max(int(each.sent().max()) for each in messages))
        largest.append(max(int(each.received().max()) for each in messages))
    return largest[0], largest[1], largest[2], largest[3]
