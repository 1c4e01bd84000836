"""Memory traffic of the rows that the runtime copies around the kernels.

Where rows arrive, all local rows move into the workspace beside them; local rows of one of several
head groups always move, since they lie among the rows of the others. A kernel call gathers its
rows, and the outputs of all calls are put in their places, merged where a row's keys are split, as
are those of all servers at their owner. The backward pass sums gradients in float32. The groups'
outputs and gradients are put together in the end. `distca.runtime` copies in `moving_rows`,
`server_kernels` and `group_call`; the traffic is counted here from the plan alone, as
`distca.cost.memory` counts the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.memory import FLOAT32_BYTES
from distca.cost.partial_rows import PartialRows, at_owners, on_servers
from distca.cost.volume import AttentionShape
from distca.plan import Plan, Segments
from distca.plan.span import Bools, Int64s, covered, cut_at
from distca.schedule.program import Pass


@dataclass(frozen=True)
class _Call:
    """Rows of each server's kernel call of one task shape, `[servers]`.

    Attributes:
        q: query rows of the call's tasks.
        kv: key rows of the call's tasks.
        gathers_q: whether the query rows are gathered, since they are not simply all served rows.
        gathers_kv: whether the key rows are gathered.
    """

    q: Int64s
    kv: Int64s
    gathers_q: Bools
    gathers_kv: Bools


@dataclass(frozen=True)
class _Rows:
    """Rows of each server, `[servers]`, of queries or keys.

    Attributes:
        local: rows that it owns.
        sent: rows that it sends to other servers.
        returning: rows of which gradients come back, of some from several servers.
        received: rows that it receives.
    """

    local: Int64s
    sent: Int64s
    returning: Int64s
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
    q = _rows(plan.q_segments, plan.own_tokens_per_rank())
    kv = _rows(plan.kv_segments, plan.placement.tokens_per_rank())
    calls = _calls(plan, q, kv)
    if direction == "forward":
        return _forward(q, kv, calls, (on_servers(plan), at_owners(plan)), shape, grouped)
    return _backward(q, kv, calls, shape, grouped)


def _rows(segments: Segments, local: Int64s) -> _Rows:
    ranks = len(local)
    moved = segments.moved_rows(ranks)
    away = segments.select(segments.owner != segments.server)
    returning = covered(away.owner, away.start, away.end, ranks)
    return _Rows(local, moved.sum(axis=1), returning, moved.sum(axis=0))


def _forward(
    q: _Rows,
    kv: _Rows,
    calls: list[_Call],
    partial_rows: tuple[PartialRows, PartialRows],
    shape: AttentionShape,
    grouped: bool,
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
        in_place |= (call.q > 0) & (number == 1) & ~call.gathers_q
    of_calls, of_servers = partial_rows
    # Outputs are put one after the other, unless there is one call; rows are taken from there.
    together = (number > 1) | (of_calls.shared > 0)
    put = 2 * out * (together * of_calls.parts + (number > 0) * q.served)
    put += _merge_traffic(of_calls, shape)
    comes_back = q.sent > 0
    traffic += np.where(in_place, comes_back * 2 * out * q.served, put)
    # The final outputs of local rows no longer lie among those of others.
    traffic += 2 * q.local * out * (~in_place | comes_back | (q.received > 0))
    traffic += comes_back * _merge_traffic(of_servers, shape)
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
        traffic += rows.sent * row * (1 + wider if wider > 1 else 0)
        several = rows.sent > rows.returning
        traffic += several * (rows.sent + rows.returning) * row * wider
        traffic += rows.returning * 3 * row * wider
        traffic += rows.local * row * (wider + 1) + 2 * grouped * rows.local * row
    return traffic


def _merge_traffic(rows: PartialRows, shape: AttentionShape) -> Int64s:
    """Bytes that merging moves, step by step as in `distca.attention.merge`."""
    q_row, lse = shape.q_row_bytes, shape.lse_row_bytes
    float32 = shape.heads * shape.head_dim * FLOAT32_BYTES
    of_members = 3 * q_row + 2 * float32 + 13 * lse
    return rows.members * of_members + rows.shared * (q_row + 2 * float32 + 7 * lse)


def _calls(plan: Plan, q: _Rows, kv: _Rows) -> list[_Call]:
    on_diagonal = plan.tasks.ends_on_diagonal
    calls = []
    for tasks in (plan.tasks[~on_diagonal], plan.tasks[on_diagonal]):
        q_rows = _sum(plan, tasks.server, tasks.q_end - tasks.q_start)
        kv_rows = _sum(plan, tasks.server, tasks.kv_end - tasks.kv_start)
        offset = plan.document_offsets[tasks.document]
        starts = offset + tasks.q_start, offset + tasks.kv_start
        ends = offset + tasks.q_end, offset + tasks.kv_end
        calls.append(
            _Call(
                q_rows,
                kv_rows,
                ~_are_served(plan.q_segments, q, tasks.server, starts[0], ends[0]),
                ~_are_served(plan.kv_segments, kv, tasks.server, starts[1], ends[1]),
            )
        )
    return calls


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
