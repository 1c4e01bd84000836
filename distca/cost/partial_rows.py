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
        gathers: whether they are gathered, since they do not follow each other in memory.
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
        destinations: servers that it sends rows to.
        sources: owners of the rows that it receives.
        placed: whether its served rows lie in the order in which calls use them, and not its own
            first.
        in_order: whether one call has all served rows, its own first.
        calls: rows of its kernel calls, of either task shape.
        of_received: results of the rows that it received, of its tasks.
        of_local: results of its own rows: of its tasks, and one of each other server.
    """

    local: Int64s
    sent: Int64s
    received: Int64s
    destinations: Int64s
    sources: Int64s
    placed: Bools
    in_order: Bools
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
    causal = plan.tasks.ends_on_diagonal
    spans = _served_spans(segments, local, received, plan.tasks.server, starts, ends, causal)
    by_use = _places(spans, ranks)
    placed = _any_of(spans.server, by_use != spans.row, ranks) & (received > 0)
    place = np.where(placed[spans.server], by_use, spans.row)
    calls = tuple(_call_rows(spans, place, spans.causal == shape, ranks) for shape in (False, True))
    here = spans.server == spans.owner
    away = segments.select(segments.owner != segments.server)
    pairs = np.unique(away.owner * ranks + away.server)
    return RankRows(
        local,
        sent,
        received,
        np.bincount(pairs // ranks, minlength=ranks),
        np.bincount(pairs % ranks, minlength=ranks),
        placed,
        _in_order(spans, local + received),
        calls,
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
    """Rows of all tasks by server, full rectangles first: cut where served rows or others begin.

    Two of a server are either the same rows or have none in common.

    Attributes:
        causal: whether the task of each ends on the diagonal.
        server: its server.
        owner: owner of the rows.
        start: first row in global positions.
        end: end, likewise.
        row: number of the first among the server's rows: its own, then those that arrive.
    """

    causal: Bools
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
    causal: Bools,
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
    by_call = np.lexsort((causal, server))
    first, last = ((server * stride + each)[by_call] for each in (starts, ends))
    cuts = np.unique(np.concatenate([line, first, last]))
    task, start, end = cut_at(first, last, cuts)
    task = by_call[task]
    segment = order[np.searchsorted(line[order], start, side="right") - 1]
    of = server[task]
    row = first_row[segment] + start - line[segment]
    owner = segments.owner[segment]
    return _Spans(causal[task], of, owner, start - of * stride, end - of * stride, row)


def _places(spans: _Spans, ranks: int) -> Int64s:
    """Places of the spans' first rows, where each server's rows lie by first use."""
    stride = int(spans.end.max(initial=0)) + 1
    _, first, which = np.unique(
        spans.server * stride + spans.start, return_index=True, return_inverse=True
    )
    new = np.zeros(len(spans.start), dtype=np.int64)
    new[first] = (spans.end - spans.start)[first]
    of_servers = np.zeros(ranks, dtype=np.int64)
    np.add.at(of_servers, spans.server, new)
    before = np.cumsum(new) - new - (np.cumsum(of_servers) - of_servers)[spans.server]
    return before[first][which]  # type: ignore[no-any-return]


def _any_of(servers: Int64s, found: Bools, ranks: int) -> Bools:
    """Servers for which anything was found, `[servers]`."""
    return np.bincount(servers, found, minlength=ranks) > 0  # type: ignore[no-any-return]


def _call_rows(spans: _Spans, place: Int64s, mine: Bools, ranks: int) -> CallRows:
    server, place = spans.server[mine], place[mine]
    lengths = (spans.end - spans.start)[mine]
    total = np.zeros(ranks, dtype=np.int64)
    np.add.at(total, server, lengths)
    in_turn = np.cumsum(lengths) - lengths - (np.cumsum(total) - total)[server]
    # Of a server's spans the last number written is that of the first.
    begin = np.zeros(ranks, dtype=np.int64)
    begin[server[::-1]] = (place - in_turn)[::-1]
    return CallRows(total, _any_of(server, place - in_turn != begin[server], ranks))


def _in_order(spans: _Spans, served: Int64s) -> Bools:
    """Whether a server's spans are all of one call, and all its served rows in order."""
    ranks = len(served)
    rows = _call_rows(spans, spans.row, np.ones_like(spans.causal), ranks)
    both = _any_of(spans.server, spans.causal, ranks) & _any_of(spans.server, ~spans.causal, ranks)
    return ~rows.gathers & (rows.rows == served) & ~both


def _partial_rows(rank: Int64s, starts: Int64s, ends: Int64s, ranks: int) -> PartialRows:
    parts = np.zeros(ranks, dtype=np.int64)
    np.add.at(parts, rank, ends - starts)
    rows, shared = (covered(rank, starts, ends, ranks, times) for times in (1, 2))
    return PartialRows(parts, shared, parts - (rows - shared))
