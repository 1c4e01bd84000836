"""One rank's part of a plan: messages on the wire, and rows and offsets of kernel calls.

Every rank computes its exchange from the plan alone, once. Sender and receiver agree on every size
and offset because both read them off the same segments. Nothing is ever negotiated.

Row numbers, all on this rank:

* a *local* row is a token that this rank owns, in the order of its placement (those of cached
  prefixes have keys and values alone);
* a *served* row is a token that this rank needs as a server: its local rows first (all of them,
  so that they need no copy where nothing arrives), then the received rows in the order
  (owner, position).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
import torch

from distca.attention.merge import Merges, Sums
from distca.plan import Mask, Plan, Segments, Tasks
from distca.plan.span import Int64s, cut_at, expand_ranges
from distca.runtime.messages import MessageLayout, PeerRows, RowTypes, message_layout, peer_rows
from distca.transport import Direction

Value = TypeVar("Value")


@dataclass(frozen=True)
class Rows:
    """Rows of one kind (queries, or keys and values), as they travel to the servers and back.

    Attributes:
        local: rows that this rank owns.
        send: local rows to send, sorted by destination, int64 `[sent]`.
        outgoing: rows that this rank sends to the servers, and that they return.
        incoming: rows that this rank receives as a server, and returns.
        sums: what is added to the local rows when their gradients are returned.
        move: whether any rank sends any row; the same on every rank.
    """

    local: int
    send: torch.Tensor
    outgoing: PeerRows
    incoming: PeerRows
    sums: Sums
    move: bool

    @property
    def sent(self) -> int:
        """Rows that this rank sends to the servers."""
        return self.send.shape[0]

    @property
    def received(self) -> int:
        """Rows that this rank receives as a server."""
        return self.incoming.place[0].shape[0]

    @property
    def served(self) -> int:
        """Rows that this rank's kernels can use: local and received."""
        return self.local + self.received


@dataclass(frozen=True)
class KernelCall:
    """One fused variable-length kernel call: all tasks of one shape of this server.

    Attributes:
        causal: whether the tasks end on the diagonal; otherwise they are full rectangles.
        cu_seqlens_q: first query of each task, and the total: int32 `[tasks + 1]` on the CPU.
        cu_seqlens_kv: first key of each task, and the total, likewise.
        q_rows: served query rows of the tasks, one task after the other, int64 `[sum of queries]`;
            None: `0 .. served - 1`, in order.
        kv_rows: served rows of keys and values, likewise.
    """

    causal: bool
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    q_rows: torch.Tensor | None
    kv_rows: torch.Tensor | None


@dataclass(frozen=True)
class Combination:
    """Rows that are made of partial ones: of one, or of several that merge by LSE.

    Attributes:
        parts: number of partial rows.
        merges: partial rows that merge, into rows that follow the partial ones; None: none do.
        rows: the partial or merged row that is each row, int64 `[rows]`.
    """

    parts: int
    merges: Merges | None
    rows: torch.Tensor

    @property
    def with_merged(self) -> int:
        """Number of partial and merged rows."""
        return self.parts + (0 if self.merges is None else self.merges.begins.shape[0])


@dataclass(frozen=True)
class Exchange:
    """Everything that one rank needs to run a plan's core attention.

    Attributes:
        rank: number of this rank.
        world_size: ranks of the plan.
        mask: visible keys of a query.
        q: query rows that travel.
        kv: key and value rows that travel.
        calls: kernel calls of this server, one for each task shape that it has.
        computed: outputs of the served rows, made of those of all calls, one after the other; None:
            they are those of the only call. Rows without a task have any output.
        finished: outputs of the local rows, made of those computed here and then those returned;
            None: none are returned.
    """

    rank: int
    world_size: int
    mask: Mask
    q: Rows
    kv: Rows
    calls: tuple[KernelCall, ...]
    computed: Combination | None
    finished: Combination | None

    @property
    def output_rows(self) -> int:
        """Rows of memory for the outputs of served rows, and later for the local rows' parts."""
        return max(self.q.served, 0 if self.finished is None else self.finished.with_merged)

    def layout(self, direction: Direction, types: RowTypes) -> MessageLayout:
        """The messages in a direction that hold rows of such tensors.

        They are laid out once: all layers have the same.
        """
        key = direction, types
        if key not in self._layouts:
            outgoing = self.q.outgoing, self.kv.outgoing
            incoming = self.q.incoming, self.kv.incoming
            sides = (outgoing, incoming) if direction == "to servers" else (incoming, outgoing)
            self._layouts[key] = message_layout(*sides, types)
        return self._layouts[key]

    @cached_property
    def _layouts(self) -> dict[tuple[Direction, RowTypes], MessageLayout]:
        return {}

    def map_indices(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Exchange:
        """Replaces every tensor of row indices by its image (`cu_seqlens` stay on the CPU)."""
        return _map_indices(self, function)


def _map_indices(value: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    if isinstance(value, torch.Tensor):
        return cast(Value, function(value)) if value.dtype == torch.int64 else value
    if isinstance(value, tuple):
        return cast(Value, tuple(_map_indices(each, function) for each in value))
    if is_dataclass(value):
        parts = {f.name: _map_indices(getattr(value, f.name), function) for f in fields(value)}
        return replace(value, **parts)  # type: ignore[type-var]
    return value


def build_exchange(plan: Plan, rank: int) -> Exchange:
    """Works out one rank's part of a plan.

    Args:
        plan: a valid plan.
        rank: rank of the plan's placement, which is a server, too.
    """
    world_size = plan.world_size
    q_segments = plan.q_segments
    kv_segments = plan.kv_segments
    # Cached prefixes have no queries here.
    own, with_prefixes = plan.own_tokens_per_rank(), plan.placement.tokens_per_rank()
    moved_q, moved_kv = (each.moved_rows(world_size) for each in (q_segments, kv_segments))
    outgoing = peer_rows(*_sent_by(rank, moved_q), *_sent_by(rank, moved_kv))
    incoming = peer_rows(*_sent_by(rank, moved_q.T), *_sent_by(rank, moved_kv.T))
    q = _rows(q_segments, rank, int(own[rank]), outgoing[0], incoming[0], bool(moved_q.any()))
    kv = _rows(
        kv_segments, rank, int(with_prefixes[rank]), outgoing[1], incoming[1], bool(moved_kv.any())
    )
    q_served = _ServedRows(q_segments, rank, q.local)
    kv_served = _ServedRows(kv_segments, rank, kv.local)
    mine = plan.tasks[plan.tasks.server == rank]
    calls, computed = [], []
    for causal in (False, True):
        tasks = mine[mine.ends_on_diagonal == causal]
        if len(tasks):
            call, q_rows = _kernel_call(plan, tasks, causal, q_served, kv_served, q, kv)
            calls.append(call)
            computed.append(q_rows)
    of_calls = np.concatenate(computed) if computed else np.zeros(0, dtype=np.int64)
    in_order = len(calls) == 1 and calls[0].q_rows is None
    return Exchange(
        rank=rank,
        world_size=world_size,
        mask=plan.mask,
        q=q,
        kv=kv,
        calls=tuple(calls),
        computed=None if in_order else _combination(of_calls, q.served),
        finished=_finished(q, of_calls) if q.sent else None,
    )


def _sent_by(rank: int, moved: Int64s) -> tuple[Int64s, Int64s]:
    """Rows that a rank sends to each, and those that lower ranks do; `moved` is `[from, to]`."""
    return moved[rank], moved[:rank].sum(axis=0)


def _rows(
    segments: Segments, rank: int, local: int, outgoing: PeerRows, incoming: PeerRows, move: bool
) -> Rows:
    mine = segments.select((segments.owner == rank) & (segments.server != rank))
    # Segments are sorted by server, then owner and position, so one owner's are by server.
    send = expand_ranges(mine.owner_row, mine.lengths)
    return Rows(local, torch.from_numpy(send), outgoing, incoming, _sums(send), move)


def _sums(rows: Int64s) -> Sums:
    """How parts are added up that belong to `rows`, server by server for each row."""
    order = np.argsort(rows, kind="stable")
    distinct, begins = np.unique(rows[order], return_index=True)
    if len(distinct) == len(rows):
        return Sums(torch.from_numpy(rows), None, None)
    return Sums(*(torch.from_numpy(each) for each in (distinct, order, begins)))


class _ServedRows:
    """Finds the served rows of spans of global positions on one server."""

    def __init__(self, segments: Segments, rank: int, local: int) -> None:
        needed = segments.select(segments.server == rank)
        is_local = needed.owner == rank
        received_lengths = np.where(is_local, 0, needed.lengths)
        arrival = np.cumsum(received_lengths) - received_lengths
        row = np.where(is_local, needed.owner_row, local + arrival)
        order = np.argsort(needed.start)
        self._start = needed.start[order]
        self._row = row[order]

    def of(self, starts: Int64s, ends: Int64s) -> Int64s:
        """Served rows of the spans, one span after the other, int64."""
        _, starts, ends = cut_at(starts, ends, self._start)
        segment = np.searchsorted(self._start, starts, side="right") - 1
        return expand_ranges(self._row[segment] + starts - self._start[segment], ends - starts)


def _kernel_call(
    plan: Plan,
    tasks: Tasks,
    causal: bool,
    q_served: _ServedRows,
    kv_served: _ServedRows,
    q: Rows,
    kv: Rows,
) -> tuple[KernelCall, Int64s]:
    """Builds one call, and lists the served query rows that it computes."""
    offset = plan.document_offsets[tasks.document]
    q_rows = q_served.of(offset + tasks.q_start, offset + tasks.q_end)
    kv_rows = kv_served.of(offset + tasks.kv_start, offset + tasks.kv_end)
    call = KernelCall(
        causal=causal,
        cu_seqlens_q=_cu_seqlens(tasks.q_end - tasks.q_start),
        cu_seqlens_kv=_cu_seqlens(tasks.kv_end - tasks.kv_start),
        q_rows=_unless_identity(q_rows, q.served),
        kv_rows=_unless_identity(kv_rows, kv.served),
    )
    return call, q_rows


def _cu_seqlens(lengths: Int64s) -> torch.Tensor:
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return torch.from_numpy(ends)


def _unless_identity(rows: Int64s, total: int) -> torch.Tensor | None:
    if len(rows) == total and np.array_equal(rows, np.arange(total)):
        return None
    return torch.from_numpy(rows)


def _finished(q: Rows, computed: Int64s) -> Combination:
    """Local outputs, of rows that this server has computed, and of those that are returned."""
    here = np.zeros(q.served, dtype=bool)
    here[computed] = True
    numbers = np.arange(q.local)
    # A row that only others compute is no part.
    rows = np.concatenate([np.where(here[: q.local], numbers, -1), q.send.numpy()])
    assert np.bincount(rows[rows >= 0], minlength=q.local).all(), "a query has no server"
    return _combination(rows, q.local)


def _combination(rows: Int64s, total: int) -> Combination:
    """Combines parts: `rows[i]`, of `total`, is the row that part `i` belongs to; -1: to none."""
    order = np.argsort(rows, kind="stable")
    order = order[rows[order] >= 0]
    counts = np.bincount(rows[order], minlength=total)
    begins = np.cumsum(counts) - counts
    # Rows of no part have any.
    found = order[np.minimum(begins, len(order) - 1)] if len(order) else np.zeros_like(begins)
    shared = np.flatnonzero(counts > 1)
    found[shared] = len(rows) + np.arange(len(shared))
    merges = None
    if len(shared):
        members = order[np.repeat(counts > 1, counts)]
        of_shared = counts[shared]
        numbers, row_of = np.arange(len(members)), np.repeat(np.arange(len(shared)), of_shared)
        columns = members, numbers, np.cumsum(of_shared) - of_shared, row_of
        merges = Merges(*(torch.from_numpy(column) for column in columns))
    return Combination(len(rows), merges, torch.from_numpy(found))
