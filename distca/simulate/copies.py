"""Memory traffic of the rows that the runtime copies around the kernels.

Messages that have rows of both kinds, and not many to each of a few peers, are put together on the
way in and out. Local rows stay where they are, and received ones where they arrive; a kernel call
copies its rows only if they do not follow each other in one of these memories. Results of all calls
lie one after the other, with those of other servers behind them; final outputs and gradients are
made of these parts, outputs merged and gradients summed where a row has several. Where one call
gives a rank's own rows and no others, its results are the final ones. `distca.runtime`
copies in `row_kernels`, `row_sources` and `latent_rows`; the traffic is counted here from the plan
alone, as `distca.cost.memory` counts the buffers. Fused kernels copy less, which is not counted.
"""

from __future__ import annotations

import numpy as np

from distca.cost.memory import FLOAT32_BYTES
from distca.cost.rows import PartialRows, RankRows
from distca.cost.volume import AttentionShape, BackwardInputs, in_pieces
from distca.plan.span import Bools, Int64s
from distca.schedule.program import Pass


def copy_traffic(
    rows: tuple[RankRows, RankRows],
    shape: AttentionShape,
    direction: Pass,
    backward_inputs: BackwardInputs = "resend",
) -> Int64s:
    """Returns the bytes that each server reads and writes to copy rows, in a layer, `[servers]`.

    Counted on top of the kernels' own traffic, one copy of the rows that are sent, and one of the
    rows that arrive.

    Args:
        rows: rows of queries and keys, as `rank_rows` counts them of a valid plan.
        shape: the heads of one tensor-parallel rank.
        direction: pass whose copies are counted.
        backward_inputs: source of the kernels' inputs in the backward pass, as in `plan_bytes`.
    """
    if direction == "forward":
        return _forward(*rows, shape)
    return _backward(*rows, shape, backward_inputs == "resend")


def _to_kernels(rows: RankRows, row_bytes: int) -> Int64s:
    """Returns the bytes of rows that calls copy to have them in turn, some of them twice more."""
    copied = np.sum([call.taken + 2 * call.overwritten for call in rows.calls], axis=0)
    return 2 * row_bytes * copied  # type: ignore[no-any-return]


def _packed(
    rows: Int64s, others: Int64s, peers: Int64s, row_bytes: int, at_once: Bools | bool = False
) -> Int64s:
    """Returns the bytes of rows that are put together before they are packed in messages: those of
    messages with rows of both kinds, unless they are written in pieces.

    Args:
        rows: rows that ranks send, `[ranks]`.
        others: rows of the other kind, likewise.
        peers: ranks that each sends them to.
        row_bytes: bytes of a row.
        at_once: whether ranks write them at once, in one piece or none.
    """
    pieces = in_pieces(peers, rows, row_bytes) & ~(at_once & (peers > 1))
    return 2 * row_bytes * np.where((others > 0) & ~pieces, rows, 0)


def _expanded(kv: RankRows, shape: AttentionShape) -> Int64s:
    """Returns the bytes of latents' products that are read, and of keys and values that are written
    of them."""
    if shape.kv_rank is None:
        return np.zeros_like(kv.local)
    row = shape.expanded_dim * shape.dtype_bytes + shape.kv_row_bytes
    return kv.received * row


def _forward(q: RankRows, kv: RankRows, shape: AttentionShape) -> Int64s:
    q_row, kv_row = shape.q_row_bytes, shape.kv_row_bytes
    traffic = _packed(q.sent, kv.sent, q.destinations, q_row)
    traffic += _packed(kv.sent, q.sent, kv.destinations, shape.moved_kv_row_bytes)
    traffic += _to_kernels(q, q_row)
    traffic += _to_kernels(kv, kv_row) + _expanded(kv, shape)
    traffic += _merge_traffic(q.of_received, shape)
    final = 2 * q.local * shape.result_row_bytes + _merge_traffic(q.of_local, shape)
    return traffic + np.where(q.computed_alone, 0, final)


def _backward(q: RankRows, kv: RankRows, shape: AttentionShape, resends: bool) -> Int64s:
    q_row, kv_row = shape.q_row_bytes, shape.kv_row_bytes
    q_inputs, moved = shape.q_inputs_row_bytes, shape.moved_kv_row_bytes
    expands = shape.kv_rank is not None
    traffic = _expanded(kv, shape)
    for rows, others, inputs, row, (sent, back), expanded in (
        (q, kv, q_inputs, q_row, (q_inputs, q_row), False),
        (kv, q, kv_row, kv_row, (moved, moved), expands),
    ):
        # Where inputs are kept messages have rows of queries alone.
        both = resends * rows.sent, resends * others.sent
        traffic += _packed(*both, rows.destinations, sent)
        traffic += _to_kernels(rows, inputs)
        # Received rows of one part each go into messages as they are, or into products.
        several = rows.of_received.shared > 0
        traffic += row * several * (rows.of_received.parts + rows.received)
        at_once = several & (not expanded)
        traffic += _packed(rows.received, others.received, rows.sources, back, at_once)
        returned = rows.sent * (not expanded)
        summed = rows.of_local.parts - rows.sent + returned + rows.local
        summed = np.where(rows.in_order & (returned == 0), 2 * rows.local, summed)
        alone = rows.in_order & (returned == 0) & (rows.received == 0)
        traffic += row * np.where(alone, 0, summed)
    if expands:
        # Gradients are put side by side for products; those of latents are added up at owners.
        side_by_side = kv_row + shape.expanded_dim * shape.dtype_bytes
        traffic += kv.received * side_by_side + moved * np.where(kv.sent, kv.sent + kv.local, 0)
    return traffic


def _merge_traffic(rows: PartialRows, shape: AttentionShape) -> Int64s:
    """Returns the bytes that merging moves, step by step as in `distca.attention.merge`."""
    out_row, lse = shape.out_row_bytes, shape.lse_row_bytes
    float32 = shape.heads * shape.value_dim * FLOAT32_BYTES
    of_members = 3 * out_row + 2 * float32 + 13 * lse
    return rows.members * of_members + rows.shared * (out_row + 2 * float32 + 7 * lse)
