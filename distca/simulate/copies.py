"""Memory traffic of the rows that the runtime copies around the kernels.

Where rows arrive, all local rows move into the workspace beside them, in the order in which kernel
calls use rows; elsewhere they stay where they are. A call gathers its rows only if they do not
follow each other there. Results of all
calls lie one after the other, with those of other servers behind them; final outputs and gradients
are made of these parts, outputs merged and gradients summed where a row has several. Where one call
gives a rank's own rows and no others, its results are the final ones. The groups' outputs and
gradients are put together in the end. `distca.runtime` copies in `moving_rows`, `server_kernels`
and `group_call`; the traffic is counted here from the plan alone, as `distca.cost.memory` counts
the buffers.
"""

from __future__ import annotations

import numpy as np

from distca.cost.memory import FLOAT32_BYTES
from distca.cost.partial_rows import PartialRows, RankRows, rank_rows
from distca.cost.volume import AttentionShape
from distca.plan import Plan
from distca.plan.span import Int64s
from distca.schedule.program import Pass


def copy_traffic(
    plan: Plan,
    shape: AttentionShape,
    direction: Pass,
    grouped: bool = False,
) -> Int64s:
    """Bytes that each server reads and writes to copy rows, in a layer, `[servers]`.

    Counted on top of the kernels' own traffic, one copy of the rows that are sent, and one of the
    rows that arrive. The backward pass is that of "resend".

    Args:
        plan: a valid plan.
        shape: the heads of one tensor-parallel rank, or of a head group of it.
        direction: pass whose copies are counted.
        grouped: the heads are one of several head groups.
    """
    q, kv = rank_rows(plan)
    if direction == "forward":
        return _forward(q, kv, shape, grouped)
    return _backward(q, kv, shape, grouped)


def _to_kernels(rows: RankRows, others: RankRows, row_bytes: int) -> Int64s:
    """Bytes of local rows that move beside those that arrive, and of those that calls gather.

    Rows that arrive are put together first where messages have rows of the other kind, too, unless
    they lie in order.
    """
    moved = np.where(rows.received > 0, rows.local, 0)
    moved += np.where(rows.placed & (others.received > 0), rows.received, 0)
    gathered = np.sum([call.rows * call.gathers for call in rows.calls], axis=0)
    return 2 * row_bytes * (moved + gathered)  # type: ignore[no-any-return]


def _packed(q: Int64s, kv: Int64s, q_bytes: int, kv_bytes: int) -> Int64s:
    """Bytes of rows that are put together before they are packed in messages: those of messages
    with rows of both kinds."""
    return 2 * ((q > 0) & (kv > 0)) * (q * q_bytes + kv * kv_bytes)  # type: ignore[no-any-return]


def _forward(q: RankRows, kv: RankRows, shape: AttentionShape, grouped: bool) -> Int64s:
    q_row, kv_row, lse = shape.q_row_bytes, shape.kv_row_bytes, shape.lse_row_bytes
    traffic = _packed(q.sent, kv.sent, q_row, kv_row)
    traffic += _to_kernels(q, kv, q_row) + _to_kernels(kv, q, kv_row)
    traffic += _merge_traffic(q.of_received, shape)
    final = 2 * q.local * (q_row + lse) + _merge_traffic(q.of_local, shape)
    traffic += np.where(q.computed_alone, 0, final)
    # The groups' outputs are put together.
    return traffic + 2 * grouped * q.local * q_row


def _backward(q: RankRows, kv: RankRows, shape: AttentionShape, grouped: bool) -> Int64s:
    q_row, kv_row = shape.q_row_bytes, shape.kv_row_bytes
    # The output's gradient, the output, its LSE, the query; the key and value.
    q_inputs = 3 * q_row + shape.lse_row_bytes
    traffic = _packed(q.sent, kv.sent, q_inputs, kv_row)
    traffic += _to_kernels(q, kv, q_inputs) + _to_kernels(kv, q, kv_row)
    traffic += _packed(q.received, kv.received, q_row, kv_row)
    for rows, row in ((q, q_row), (kv, kv_row)):
        # Received rows of one part each go into messages as they are.
        several = rows.of_received.shared > 0
        traffic += row * several * (rows.of_received.parts + rows.received)
        first = rows.in_order & (rows.sent == 0)
        summed = np.where(first, 2 * rows.local, rows.of_local.parts + rows.local)
        traffic += row * np.where(rows.computed_alone, 0, summed)
        traffic += 2 * grouped * rows.local * row
    return traffic


def _merge_traffic(rows: PartialRows, shape: AttentionShape) -> Int64s:
    """Bytes that merging moves, step by step as in `distca.attention.merge`."""
    q_row, lse = shape.q_row_bytes, shape.lse_row_bytes
    float32 = shape.heads * shape.head_dim * FLOAT32_BYTES
    of_members = 3 * q_row + 2 * float32 + 13 * lse
    return rows.members * of_members + rows.shared * (q_row + 2 * float32 + 7 * lse)
