"""Rows of each rank as plans make them: where they lie for its kernels, and of how many parts their
results are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan import Plan, Segments
from distca.plan.span import Bools, Int64s, covered, expand_ranges, numbered, order_by, sums


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


MOST_PIECES, PIECE_ROWS = 20, 512
"""Most pieces in which a call's rows are copied, since each takes an operation of its own, and rows
that a piece has at least on average."""


def copied_in_pieces(pieces: Int64s, rows: Int64s) -> Bools:
    """Whether rows of a call that lie in both memories are copied piece by piece."""
    return (pieces <= MOST_PIECES) & (rows >= pieces * PIECE_ROWS)


@dataclass(frozen=True)
class CallRowCounts:
    """Rows of each server's kernel call of one task shape, `[ranks]`.

    Attributes:
        rows: rows of the call's tasks.
        received: those of them that were received, and are not the server's own.
        pieces: pieces of them that follow each other in memory.
    """

    rows: Int64s
    received: Int64s
    pieces: Int64s

    @property
    def taken(self) -> Int64s:
        """Rows that are copied to lie in turn; 0: they are used where they lie."""
        return np.where(self.pieces > 1, self.rows, 0)

    @property
    def overwritten(self) -> Int64s:
        """Rows that are gathered apart, and overwrite others: `GatherBoth` of `distca.runtime`."""
        fewer = np.minimum(self.received, self.rows - self.received)
        return np.where(copied_in_pieces(self.pieces, self.rows), 0, fewer)

    @property
    def indices(self) -> Int64s:
        """Indices by which rows are gathered."""
        both = (self.received > 0) & (self.received < self.rows)
        in_pieces = both & copied_in_pieces(self.pieces, self.rows)
        return np.where(in_pieces, 0, self.taken) + 2 * self.overwritten


@dataclass(frozen=True)
class RankRows:
    """Rows of one kind, queries or keys, on each rank, `[ranks]`: see `distca.runtime.exchange`.

    Attributes:
        local: rows that it owns.
        sent: rows that it sends to other servers.
        received: rows that it receives.
        destinations: servers that it sends rows to.
        sources: owners of the rows that it receives.
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
    in_order: Bools
    calls: tuple[CallRowCounts, ...]
    of_received: PartialRows
    of_local: PartialRows

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
    owner, of_server, moved = segments.moved()
    sent, received = sums(owner, moved, ranks), sums(of_server, moved, ranks)
    causal = plan.tasks.ends_on_diagonal
    spans = _served_spans(segments, local, received, plan.tasks.server, starts, ends, causal)
    is_first = spans.first == np.arange(len(spans.first))
    in_turn = _follow_each_other(spans)
    own = spans.row < local[spans.server]
    full, causal_ones = (
        _call_rows(spans, own, in_turn, spans.causal == shape, ranks) for shape in (False, True)
    )
    in_order = (full.rows == 0) | (causal_ones.rows == 0)
    in_order &= full.rows + causal_ones.rows == local + received
    in_order &= np.bincount(spans.server[~in_turn], minlength=ranks) <= 1
    here = spans.server == spans.owner
    away = segments.select(segments.owner != segments.server)
    return RankRows(
        local,
        sent,
        received,
        np.bincount(owner, minlength=ranks),
        np.bincount(of_server, minlength=ranks),
        in_order,
        (full, causal_ones),
        _of_received(spans, is_first, here, ranks),
        _of_local(
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
        first: number of the first span that has the same rows.
    """

    causal: Bools
    server: Int64s
    owner: Int64s
    start: Int64s
    end: Int64s
    row: Int64s
    first: Int64s

    @property
    def lengths(self) -> Int64s:
        return self.end - self.start


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
    # All servers' positions on one line, so that one sort serves all.
    stride = int(segments.end.max(initial=0)) + 1
    by_call = order_by(server, causal)
    edges = np.concatenate(
        [segments.server * stride + segments.start]
        + [(server * stride + each)[by_call] for each in (starts, ends)]
    )
    opens, cut = numbered(edges)
    cuts, segments_end = edges[opens], len(segments.start)
    of_segment, first, last = np.split(cut, [segments_end, segments_end + len(server)])
    # Each segment goes on from cut to cut until the next one begins.
    begins = np.full(len(cuts), -1)
    begins[of_segment] = np.arange(segments_end)
    segment = begins[begins >= 0][np.cumsum(begins >= 0) - 1]
    start = cuts - segments.server[segment] * stride
    row = first_row[segment] + start - segments.start[segment]
    end = start + np.diff(cuts, append=0)
    task = np.repeat(by_call, last - first)
    part = expand_ranges(first, last - first)
    return _Spans(
        causal[task],
        server[task],
        segments.owner[segment][part],
        start[part],
        end[part],
        row[part],
        _first_of_each(part, len(cuts)),
    )


def _first_of_each(part: Int64s, parts: int) -> Int64s:
    """Number of the first span that has the same rows as each, `[spans]`."""
    first = np.zeros(parts, dtype=np.int64)
    # Of several the last number written is that of the first.
    first[part[::-1]] = np.arange(len(part))[::-1]
    return first[part]


def _follow_each_other(spans: _Spans) -> Bools:
    """Whether each span's rows are those after the ones before it in its server's call."""
    follows = np.zeros(len(spans.row), dtype=bool)
    ends = spans.row + spans.lengths
    follows[1:] = (spans.server[1:] == spans.server[:-1]) & (spans.row[1:] == ends[:-1])
    follows[1:] &= spans.causal[1:] == spans.causal[:-1]
    return follows


def _call_rows(spans: _Spans, own: Bools, follows: Bools, mine: Bools, ranks: int) -> CallRowCounts:
    server, lengths, own = spans.server[mine], spans.lengths[mine], own[mine]
    begins = ~follows[mine]
    begins[1:] |= own[1:] != own[:-1]
    return CallRowCounts(
        sums(server, lengths, ranks),
        sums(server[~own], lengths[~own], ranks),
        np.bincount(server[begins], minlength=ranks),
    )


def _of_received(spans: _Spans, is_first: Bools, here: Bools, ranks: int) -> PartialRows:
    """Counts results of rows that servers do not own."""
    several = np.bincount(spans.first, minlength=len(spans.first)) > 1
    parts, rows, shared = (
        sums(spans.server[mine], spans.lengths[mine], ranks)
        for mine in (~here, is_first & ~here, several & ~here)
    )
    return PartialRows(parts, shared, parts - (rows - shared))


def _of_local(rank: Int64s, starts: Int64s, ends: Int64s, ranks: int) -> PartialRows:
    """Counts results of each rank's own rows, of ranges of these."""
    parts = sums(rank, ends - starts, ranks)
    rows, shared = covered(rank, starts, ends, ranks, times=(1, 2))
    return PartialRows(parts, shared, parts - (rows - shared))
