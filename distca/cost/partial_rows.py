"""Rows of each rank as plans make them: where they lie for its kernels, and of how many parts their
results are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan import Plan, Segments
from distca.plan.span import Bools, Int64s, covered, cut_at


@dataclass(frozen=True)
class PartialRows:
    """Numbers of rows on each rank, int64 `[ranks]`.

    Attributes:
        parts: partial rows.
        shared: rows of which there are several parts, which merge.
        members: parts of the shared rows.
    """

    parts: Int64s
    shared: Int64s
    members: Int64s


@dataclass(frozen=True)
class CallRows:
    """Rows of each server's kernel call of one task shape, `[ranks]`.

    Attributes:
        rows: rows of the call's tasks.
        gathers: whether they are gathered, since they are not simply all served rows.
    """

    rows: Int64s
    gathers: Bools


@dataclass(frozen=True)
class RankRows:
    """Rows of one kind, queries or keys, on each rank, `[ranks]`: see `distca.runtime.exchange`.

    Attributes:
        local: rows that it owns.
        sent: rows that it sends to other servers.
        received: rows that it receives.
        calls: rows of its kernel calls, of either task shape.
        of_received: results of the rows that it received, of its tasks.
        of_local: results of its own rows: of its tasks, and one of each other server.
    """

    local: Int64s
    sent: Int64s
    received: Int64s
    calls: tuple[CallRows, ...]
    of_received: PartialRows
    of_local: PartialRows

    @property
    def served(self) -> Int64s:
        """Rows that a server's kernels can use."""
        return self.local + self.received

    @property
    def parts(self) -> Int64s:
        """Rows of all its calls."""
        return np.sum([call.rows for call in self.calls], axis=0)  # type: ignore[no-any-return]

    @property
    def in_order(self) -> Bools:
        """Whether one call has all served rows, in order."""
        number = np.sum([call.rows > 0 for call in self.calls], axis=0)
        whole = np.any([(call.rows > 0) & ~call.gathers for call in self.calls], axis=0)
        return (number == 1) & whole  # type: ignore[no-any-return]

    @property
    def computed_alone(self) -> Bools:
        """Whether what a server's one call gives are the results of its own rows, no more."""
        return self.in_order & (self.sent == 0) & (self.received == 0)


def rank_rows(plan: Plan) -> tuple[RankRows, RankRows]:
    """Counts the rows of queries, and those of keys."""
    t = plan.tasks
    offset = plan.document_offsets[t.document]
    of_kinds = (
        (plan.q_segments, plan.own_tokens_per_rank(), offset + t.q_start, offset + t.q_end),
        (
            plan.kv_segments,
            plan.placement.tokens_per_rank(),
            offset + t.kv_start,
            offset + t.kv_end,
        ),
    )
    q, kv = (_rank_rows(plan, *of_kind) for of_kind in of_kinds)
    return q, kv


def _rank_rows(
    plan: Plan, segments: Segments, local: Int64s, starts: Int64s, ends: Int64s
) -> RankRows:
    ranks = plan.world_size
    sent, received = segments.moved_per_rank(ranks)
    spans = _served_spans(segments, local, received, plan.tasks.server, starts, ends)
    causal = plan.tasks.ends_on_diagonal[spans.task]
    here = spans.server == spans.owner
    away = segments.select(segments.owner != segments.server)
    return RankRows(
        local,
        sent,
        received,
        tuple(_call_rows(spans, causal == shape, local + received) for shape in (False, True)),
        _partial_rows(spans.server[~here], spans.start[~here], spans.end[~here], ranks),
        _partial_rows(
            np.concatenate([spans.server[here], away.owner]),
            np.concatenate([spans.start[here], away.start]),
            np.concatenate([spans.end[here], away.end]),
            ranks,
        ),
    )


@dataclass(frozen=True)
class _Spans:
    """Rows of all tasks, cut where served rows begin.

    Attributes:
        task: task of each.
        server: its server.
        owner: owner of the rows.
        start: first row in global positions.
        end: end, likewise.
        row: number of the first among the server's rows: its own, then those that arrive.
    """

    task: Int64s
    server: Int64s
    owner: Int64s
    start: Int64s
    end: Int64s
    row: Int64s


def _served_spans(
    segments: Segments,
    local: Int64s,
    received: Int64s,
    server: Int64s,
    starts: Int64s,
    ends: Int64s,
) -> _Spans:
    # Rows arrive by owner and position.
    arriving = np.where(segments.owner == segments.server, 0, segments.lengths)
    before = np.cumsum(received) - received
    arrival = np.cumsum(arriving) - arriving - before[segments.server]
    first_row = np.where(arriving > 0, local[segments.server] + arrival, segments.owner_row)
    # All servers' positions on one line, so that one search serves all.
    stride = int(segments.end.max(initial=0)) + 1
    line = segments.server * stride + segments.start
    order = np.argsort(line)
    task, start, end = cut_at(server * stride + starts, server * stride + ends, line[order])
    segment = order[np.searchsorted(line[order], start, side="right") - 1]
    of = server[task]
    row = first_row[segment] + start - line[segment]
    return _Spans(task, of, segments.owner[segment], start - of * stride, end - of * stride, row)


def _call_rows(spans: _Spans, mine: Bools, served: Int64s) -> CallRows:
    server, row = spans.server[mine], spans.row[mine]
    by_server = np.argsort(server, kind="stable")
    lengths, of = (spans.end - spans.start)[mine][by_server], server[by_server]
    total = np.zeros_like(served)
    np.add.at(total, of, lengths)
    in_turn = np.cumsum(lengths) - lengths - (np.cumsum(total) - total)[of]
    moved = np.zeros(len(total), dtype=bool)
    moved[of[row[by_server] != in_turn]] = True
    return CallRows(total, (total != served) | moved)


def _partial_rows(rank: Int64s, starts: Int64s, ends: Int64s, ranks: int) -> PartialRows:
    parts = np.zeros(ranks, dtype=np.int64)
    np.add.at(parts, rank, ends - starts)
    rows, shared = (covered(rank, starts, ends, ranks, times) for times in (1, 2))
    return PartialRows(parts, shared, parts - (rows - shared))
