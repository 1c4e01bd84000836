"""Memory traffic of the rows that the runtime copies around the kernels.

Where rows arrive, all local rows move into the workspace beside them; local rows of one of several
head groups always move, since they lie among the rows of the others. A kernel call gathers its
rows, and its outputs are put in their places, merged where a row's keys are split. The backward
pass sums gradients in float32. The groups' outputs and gradients are put together in the end.
`distca.runtime` copies in `moving_rows`, `server_kernels` and `group_call`; the traffic is counted
here from the plan alone, as `distca.cost.memory` counts the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.memory import FLOAT32_BYTES
from distca.cost.volume import AttentionShape
from distca.plan import Plan, Segments, Tasks
from distca.plan.span import Bools, Int64s, cut_at, union
from distca.schedule.program import Pass


@dataclass(frozen=True)
class _Call:
    """Rows of each server's kernel call of one task shape, `[servers]`.

    Attributes:
        q: query rows of the call's tasks.
        kv: key rows of the call's tasks.
        first: query rows that no call has computed before.
        gathers_q: whether the query rows are gathered, since they are not simply all served rows.
        gathers_kv: whether the key rows are gathered.
    """

    q: Int64s
    kv: Int64s
    first: Int64s
    gathers_q: Bools
    gathers_kv: Bools


@dataclass(frozen=True)
class _Rows:
    """Rows of each server, `[servers]`, of queries or keys."""

    local: Int64s
    sent: Int64s
    received: Int64s

    @property
    def served(self) -> Int64s:
        return self.local + self.received

    def moves(self, always: bool) -> Int64s:
        """Local rows that move into the workspace: where rows arrive, or everywhere."""
        return np.where(always | (self.received > 0), self.local, 0)


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
    q, kv = (
        _Rows(local, moved.sum(axis=1), moved.sum(axis=0))
        for local, moved in (
            (plan.own_tokens_per_rank(), plan.q_segments.moved_rows(plan.world_size)),
            (plan.placement.tokens_per_rank(), plan.kv_segments.moved_rows(plan.world_size)),
        )
    )
    calls = _calls(plan, q, kv)
    if direction == "forward":
        return _forward(q, kv, calls, _merged(plan, q), shape, grouped)
    return _backward(q, kv, calls, shape, grouped)


def _merged(plan: Plan, q: _Rows) -> Int64s:
    """Rows that return to each owner and are merged with others of the same query, `[servers]`."""
    segments = plan.q_segments
    own = segments.select(segments.owner == segments.server)
    # All of a query's outputs are merged but the first, wherever that is computed.
    return q.sent + _sum(plan, own.owner, own.lengths) - q.local


def _forward(
    q: _Rows, kv: _Rows, calls: list[_Call], merged: Int64s, shape: AttentionShape, grouped: bool
) -> Int64s:
    q_row, kv_row, lse = shape.q_row_bytes, shape.kv_row_bytes, shape.lse_row_bytes
    out = q_row + lse
    # Rows that are sent are gathered, and then packed in messages.
    traffic = 2 * (q.sent * q_row + kv.sent * kv_row)
    traffic += 2 * (q.moves(grouped) * q_row + kv.moves(grouped) * kv_row)
    number = np.sum([call.q > 0 for call in calls], axis=0)
    in_place = np.zeros(len(traffic), dtype=bool)
    for call in calls:
        traffic += 2 * (call.q * call.gathers_q * q_row + call.kv * call.gathers_kv * kv_row)
        # The kernel's own output is the result where one call computes each row once, in order.
        in_place |= (call.q > 0) & (number == 1) & ~call.gathers_q & (call.first == call.q)
        repeated = call.q - call.first
        puts = 2 * call.first * out * (1 + (repeated > 0)) + repeated * _merge_traffic(shape)
        traffic += np.where(in_place, 0, puts)
    # The final outputs of local rows no longer lie among those of others.
    traffic += 2 * q.local * out * (~in_place | (q.received > 0))
    # Outputs that come back are gathered, and put in place or merged with what is there.
    traffic += 4 * (q.sent - merged) * out + merged * _merge_traffic(shape)
    # The groups' outputs are put together.
    return traffic + 2 * grouped * q.local * q_row


def _backward(
    q: _Rows, kv: _Rows, calls: list[_Call], shape: AttentionShape, grouped: bool
) -> Int64s:
    q_row, kv_row, lse = shape.q_row_bytes, shape.kv_row_bytes, shape.lse_row_bytes
    wider = FLOAT32_BYTES // shape.dtype_bytes
    # The output's gradient, the output, its LSE, the query; the key and value.
    q_inputs = 3 * q_row + lse
    traffic = 2 * (q.sent * q_inputs + kv.sent * kv_row)
    traffic += 2 * (q.moves(grouped) * 3 * q_row + kv.moves(grouped) * kv_row)
    # Each group has an LSE of its own.
    traffic += 2 * q.moves(False) * lse
    # Sums are written as zeros.
    traffic += wider * (q.served * q_row + kv.served * kv_row)
    for call in calls:
        traffic += 2 * (call.q * call.gathers_q * q_inputs + call.kv * call.gathers_kv * kv_row)
        # A part is read, and the sum read and written; parts that go to rows are made float32.
        added = 1 + 2 * wider
        converted = added + 2 * wider if wider > 1 else added
        traffic += call.q * q_row * np.where(call.gathers_q, converted, added)
        traffic += call.kv * kv_row * np.where(call.gathers_kv, converted, added)
    for rows, row in ((q, q_row), (kv, kv_row)):
        # Gradients are made narrower before they are sent back, and wider before they are added.
        traffic += rows.received * row * (wider + 1 if wider > 1 else 0)
        traffic += rows.sent * row * (1 + 4 * wider)
        traffic += rows.local * row * (wider + 1) + 2 * grouped * rows.local * row
    return traffic


def _merge_traffic(shape: AttentionShape) -> int:
    """Bytes that a merge moves for a row, step by step as in `distca.attention.merge`."""
    float32 = shape.heads * shape.head_dim * FLOAT32_BYTES
    return 9 * shape.q_row_bytes + 10 * float32 + 21 * shape.lse_row_bytes


def _calls(plan: Plan, q: _Rows, kv: _Rows) -> list[_Call]:
    on_diagonal = plan.tasks.ends_on_diagonal
    calls = []
    computed = np.zeros(plan.world_size, dtype=np.int64)
    for tasks, until_now in (
        (plan.tasks[~on_diagonal], plan.tasks[~on_diagonal]),
        (plan.tasks[on_diagonal], plan.tasks),
    ):
        q_rows = _sum(plan, tasks.server, tasks.q_end - tasks.q_start)
        kv_rows = _sum(plan, tasks.server, tasks.kv_end - tasks.kv_start)
        distinct = _distinct_queries(plan, until_now)
        offset = plan.document_offsets[tasks.document]
        starts = offset + tasks.q_start, offset + tasks.kv_start
        ends = offset + tasks.q_end, offset + tasks.kv_end
        calls.append(
            _Call(
                q_rows,
                kv_rows,
                distinct - computed,
                ~_are_served(plan.q_segments, q, tasks.server, starts[0], ends[0]),
                ~_are_served(plan.kv_segments, kv, tasks.server, starts[1], ends[1]),
            )
        )
        computed = distinct
    return calls


def _distinct_queries(plan: Plan, tasks: Tasks) -> Int64s:
    offset = plan.document_offsets[tasks.document]
    server, start, end = union(tasks.server, offset + tasks.q_start, offset + tasks.q_end)
    return _sum(plan, server, end - start)


def _are_served(
    segments: Segments, rows: _Rows, server: Int64s, starts: Int64s, ends: Int64s
) -> Bools:
    """Whether the rows of a server's tasks, one after the other, are all its served rows in order.

    Args:
        segments: rows that servers need.
        rows: numbers of rows of each server.
        server: server of each task.
        starts, ends: global positions of each task's first row, and after its last.
    """
    # Served rows: local ones, then those that arrive, by owner and position.
    arriving = np.where(segments.owner == segments.server, 0, segments.lengths)
    before = np.cumsum(rows.received) - rows.received
    arrival = np.cumsum(arriving) - arriving - before[segments.server]
    first_row = np.where(arriving > 0, rows.local[segments.server] + arrival, segments.owner_row)
    # All servers' positions on one line, so that one search serves all.
    stride = int(segments.end.max(initial=0)) + 1
    line = segments.server * stride + segments.start
    order = np.argsort(line)
    server_line = server * stride
    task, starts, ends = cut_at(server_line + starts, server_line + ends, line[order])
    segment = order[np.searchsorted(line[order], starts, side="right") - 1]
    row = first_row[segment] + starts - line[segment]
    by_server = np.argsort(server[task], kind="stable")
    lengths, of = (ends - starts)[by_server], server[task][by_server]
    total = np.zeros_like(rows.local)
    np.add.at(total, of, lengths)
    in_turn = np.cumsum(lengths) - lengths - (np.cumsum(total) - total)[of]
    moved = np.zeros(len(total), dtype=bool)
    moved[of[row[by_server] != in_turn]] = True
    return (total == rows.served) & ~moved


def _sum(plan: Plan, server: Int64s, rows: Int64s) -> Int64s:
    total = np.zeros(plan.world_size, dtype=np.int64)
    np.add.at(total, server, rows)
    return total
