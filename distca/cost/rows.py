"""Rows of a plan, the one accounting of them: where they lie on servers, which of them each kernel
call takes, and of how many parts its results are made.

The runtime makes its row indices of it (`distca.runtime.exchange`); buffers (`distca.cost.memory`)
and copies (`distca.simulate.copies`) count its rows. Who sends how many to whom is
`Segments.moved`. `distca.cost.volume` counts its bytes, and the runtime makes messages from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.plan import Plan, Segments, Tasks
from distca.plan.plan import KeyRanges
from distca.plan.span import Bools, Int64s, covered, expand_ranges, numbered, order_by, sums


@dataclass(frozen=True)
class PartialRows:
    """Numbers of rows on each rank, int64 `[ranks]`.

    Attributes:
        parts: partial rows.
        shared: rows that have several parts. Merging adds these up.
        members: parts of the shared rows.
    """

    parts: Int64s
    shared: Int64s
    members: Int64s


MOST_PIECES, PIECE_ROWS = 20, 512
"""Most pieces in which a call's rows are copied, since each takes an operation of its own, and rows
that a piece has at least on average."""


def copied_in_pieces(pieces: Int64s, rows: Int64s) -> Bools:
    """Returns whether rows of a call that lie in both memories are copied piece by piece."""
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
        """Indices by which rows are gathered, from both memories apart and from both at once."""
        both = (self.received > 0) & (self.received < self.rows)
        apart = both & ~copied_in_pieces(self.pieces, self.rows)
        return self.taken * (1 + apart) + 2 * self.overwritten


@dataclass(frozen=True)
class RankRows:
    """Rows of one kind, queries or keys, on each rank, `[ranks]`.

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


@dataclass(frozen=True)
class CallSpans:
    """Rows of all kernel calls by server, full rectangles first: spans of one task after the other.

    Tasks are cut where rows of a segment or of another task of the server begin or end: two spans
    of a server are the same rows, or have none in common.

    Attributes:
        causal: whether the task of each ends on the diagonal.
        server: its server.
        owner: owner of the rows.
        start: first row in global positions.
        end: end, likewise.
        row: number of the first among the server's rows: its own, then those that arrive.
        same: number of its rows: spans of equal numbers are the same rows.
    """

    causal: Bools
    server: Int64s
    owner: Int64s
    start: Int64s
    end: Int64s
    row: Int64s
    same: Int64s

    @property
    def lengths(self) -> Int64s:
        return self.end - self.start

    @cached_property
    def follows(self) -> Bools:
        """Whether each span's rows are those after the ones before it in its call, `[spans]`."""
        follows = np.zeros(len(self.row), dtype=bool)
        ends = self.row + self.lengths
        follows[1:] = (self.server[1:] == self.server[:-1]) & (self.row[1:] == ends[:-1])
        follows[1:] &= self.causal[1:] == self.causal[:-1]
        return follows

    def in_order(self, served: Int64s) -> Bools:
        """Returns whether one call of each server takes all its rows in their order, `[ranks]`.

        Args:
            served: rows of each server, its own and those that arrive, `[ranks]`.
        """
        runs = np.bincount(self.server[~self.follows], minlength=len(served))
        taken = np.bincount(self.server, self.lengths, minlength=len(served))
        return (runs == 1) & (taken == served)

    def rows(self, causal: bool) -> Int64s:
        """Numbers of the rows that calls of one task shape take, in turn, int64 `[rows]`."""
        mine = self.causal == causal
        return expand_ranges(self.row[mine], self.lengths[mine])


@dataclass(frozen=True)
class KindRows:
    """Rows of one kind, queries or keys, in a plan, and tasks of all servers or of one.

    Attributes:
        segments: rows that all servers need, and their owners.
        needed: those of them that the tasks need.
        local: rows that each rank owns, int64 `[ranks]`.
        server: server of each range of a task's rows, int64 `[ranges]`, one task after the other.
            Each has one, but for the keys of documents with parents.
        start: first row of each range in global positions, likewise.
        end: its end, likewise.
        causal: whether the task ends on the diagonal, `[ranges]`.
    """

    segments: Segments
    needed: Segments
    local: Int64s
    server: Int64s
    start: Int64s
    end: Int64s
    causal: Bools

    def call_spans(self) -> CallSpans:
        """Finds the rows of kernel calls."""
        segments, server = self.needed, self.server
        first_row = segments.served_rows(self.local)
        # All servers' positions on one line, so that one sort serves all.
        stride = int(segments.end.max(initial=0)) + 1
        by_call = order_by(server, self.causal)
        edges = np.concatenate(
            [segments.server * stride + segments.start]
            + [(server * stride + each)[by_call] for each in (self.start, self.end)]
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
        return CallSpans(
            self.causal[task],
            server[task],
            segments.owner[segment][part],
            start[part],
            end[part],
            row[part],
            part,
        )

    def per_rank(self) -> RankRows:
        """Counts rows on each rank."""
        ranks, segments = len(self.local), self.segments
        owner, of_server, moved = segments.moved()
        sent, received = sums(owner, moved, ranks), sums(of_server, moved, ranks)
        spans = self.call_spans()
        full, causal = (_call_rows(spans, self.local, shape) for shape in (False, True))
        here = spans.server == spans.owner
        away = segments.select(segments.owner != segments.server)
        return RankRows(
            self.local,
            sent,
            received,
            np.bincount(owner, minlength=ranks),
            np.bincount(of_server, minlength=ranks),
            spans.in_order(self.local + received),
            (full, causal),
            _of_received(spans, here, received),
            _of_local(
                np.concatenate([spans.server[here], away.owner]),
                np.concatenate([spans.start[here], away.start]),
                np.concatenate([spans.end[here], away.end]),
                ranks,
            ),
        )


def sent_rows(segments: Segments, rank: int) -> Int64s:
    """Returns the local rows that a rank sends, sorted by destination, then position, int64
    `[rows]`."""
    # Segments are sorted by server, then owner and position, so one owner's are by server.
    away = segments.select((segments.owner == rank) & (segments.server != rank))
    return expand_ranges(away.owner_row, away.lengths)


def rows_of_kinds(plan: Plan, server: int | None = None) -> tuple[KindRows, KindRows]:
    """Returns the rows of queries, and those of keys; cached prefixes have no queries.

    Args:
        plan: a valid plan.
        server: server whose tasks are wanted; None: all.
    """
    t = plan.tasks if server is None else plan.tasks[plan.tasks.server == server]
    keys = plan.key_ranges
    if server is not None:
        mine = plan.tasks.server[keys.task] == server
        keys = KeyRanges(*(column[mine] for column in keys))
    of_keys = plan.tasks[keys.task]
    offset = plan.query_offsets[t.document]

    def of_kind(
        segments: Segments, local: Int64s, tasks: Tasks, start: Int64s, end: Int64s
    ) -> KindRows:
        needed = segments if server is None else segments.select(segments.server == server)
        return KindRows(segments, needed, local, tasks.server, start, end, tasks.ends_on_diagonal)

    own, placed = plan.own_tokens_per_rank(), plan.placement.tokens_per_rank()
    return (
        of_kind(plan.q_segments, own, t, offset + t.q_start, offset + t.q_end),
        of_kind(plan.kv_segments, placed, of_keys, keys.start, keys.end),
    )


def rank_rows(plan: Plan) -> tuple[RankRows, RankRows]:
    """Counts the rows of queries on each rank, and those of keys."""
    q, kv = rows_of_kinds(plan)
    return q.per_rank(), kv.per_rank()


def _call_rows(spans: CallSpans, local: Int64s, causal: bool) -> CallRowCounts:
    mine, ranks = spans.causal == causal, len(local)
    server, lengths = spans.server[mine], spans.lengths[mine]
    own, begins = spans.row[mine] < local[server], ~spans.follows[mine]
    begins[1:] |= own[1:] != own[:-1]
    return CallRowCounts(
        sums(server, lengths, ranks),
        sums(server[~own], lengths[~own], ranks),
        np.bincount(server[begins], minlength=ranks),
    )


def _of_received(spans: CallSpans, here: Bools, received: Int64s) -> PartialRows:
    """Counts results of rows that servers do not own: each of these is some task's."""
    ranks, times = len(received), np.bincount(spans.same)
    # One span stands for all that are the same rows.
    one = np.zeros(len(times), dtype=np.int64)
    one[spans.same] = np.arange(len(spans.same))
    several = one[times > 1]
    several = several[~here[several]]
    shared = sums(spans.server[several], spans.lengths[several], ranks)
    parts = sums(spans.server[~here], spans.lengths[~here], ranks)
    return PartialRows(parts, shared, parts - (received - shared))


def _of_local(rank: Int64s, starts: Int64s, ends: Int64s, ranks: int) -> PartialRows:
    """Counts results of each rank's own rows, of ranges of these."""
    parts = sums(rank, ends - starts, ranks)
    rows, shared = covered(rank, starts, ends, ranks, times=(1, 2))
    return PartialRows(parts, shared, parts - (rows - shared))
