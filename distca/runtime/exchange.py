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
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.plan import Mask, Plan, Segments, Tasks
from distca.plan.span import Int64s, cut_at, expand_ranges


@dataclass(frozen=True)
class Rows:
    """Rows of one kind (queries, or keys and values), as they travel to the servers and back.

    Attributes:
        local: rows that this rank owns.
        send: local rows to send, sorted by destination, int64 `[sum(send_counts)]`.
        send_counts: rows to each rank.
        receive_counts: rows from each rank.
        sent_before: rows that lower ranks than this one send to each rank.
        returned_before: rows that lower ranks than this one return to each rank.
        move: whether any rank sends any row; the same on every rank.
    """

    local: int
    send: torch.Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    sent_before: tuple[int, ...]
    returned_before: tuple[int, ...]
    move: bool

    @property
    def received(self) -> int:
        """Rows that this rank receives as a server."""
        return sum(self.receive_counts)

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
        first_q: indices into the call's queries, of those whose row no earlier call or task has
            produced, int64; None: all.
        repeated_q: indices of the others, in parts within which no row repeats: these merge by LSE.
    """

    causal: bool
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    q_rows: torch.Tensor | None
    kv_rows: torch.Tensor | None
    first_q: torch.Tensor | None
    repeated_q: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Arrival:
    """Output rows that one server returns, split by whether their local row has an output yet.

    Attributes:
        server: rank that computed the rows.
        first: indices into the server's returned rows, of the first to arrive for their local row
            (in the order own rows, then server 0, 1, ...), int64.
        repeated: indices of the others, which merge by LSE with the row's output so far, int64.
    """

    server: int
    first: torch.Tensor
    repeated: torch.Tensor


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
        arrivals: output rows that servers return, in order of servers.
    """

    rank: int
    world_size: int
    mask: Mask
    q: Rows
    kv: Rows
    calls: tuple[KernelCall, ...]
    arrivals: tuple[Arrival, ...]

    def map_indices(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Exchange:
        """Replaces every tensor of row indices by its image (`cu_seqlens` stay on the CPU)."""

        def optional(index: torch.Tensor | None) -> torch.Tensor | None:
            return None if index is None else function(index)

        return replace(
            self,
            q=replace(self.q, send=function(self.q.send)),
            kv=replace(self.kv, send=function(self.kv.send)),
            calls=tuple(
                replace(
                    call,
                    q_rows=optional(call.q_rows),
                    kv_rows=optional(call.kv_rows),
                    first_q=optional(call.first_q),
                    repeated_q=tuple(function(part) for part in call.repeated_q),
                )
                for call in self.calls
            ),
            arrivals=tuple(
                replace(each, first=function(each.first), repeated=function(each.repeated))
                for each in self.arrivals
            ),
        )


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
    q = _rows(q_segments, rank, own)
    kv = _rows(kv_segments, rank, with_prefixes)
    q_served = _ServedRows(q_segments, rank, q.local)
    kv_served = _ServedRows(kv_segments, rank, kv.local)
    mine = plan.tasks[plan.tasks.server == rank]
    produced = np.zeros(q.served, dtype=bool)
    calls = []
    for causal in (False, True):
        tasks = mine[mine.ends_on_diagonal == causal]
        if len(tasks):
            calls.append(_kernel_call(plan, tasks, causal, q_served, kv_served, produced, q, kv))
    return Exchange(
        rank=rank,
        world_size=world_size,
        mask=plan.mask,
        q=q,
        kv=kv,
        calls=tuple(calls),
        arrivals=_arrivals(q, produced[: q.local], rank),
    )


def _rows(segments: Segments, rank: int, local: Int64s) -> Rows:
    moved = segments.moved_rows(len(local))
    outgoing = segments.select((segments.owner == rank) & (segments.server != rank))
    return Rows(
        local=int(local[rank]),
        # Segments are sorted by server, then owner and position, so one owner's are by server.
        send=torch.from_numpy(expand_ranges(outgoing.owner_row, outgoing.lengths)),
        send_counts=tuple(moved[rank].tolist()),
        receive_counts=tuple(moved[:, rank].tolist()),
        sent_before=tuple(moved[:rank].sum(axis=0).tolist()),
        returned_before=tuple(moved[:, :rank].sum(axis=1).tolist()),
        move=bool(moved.any()),
    )


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
    produced: np.ndarray,
    q: Rows,
    kv: Rows,
) -> KernelCall:
    """Builds one call, and marks the query rows that it produces in `produced`."""
    offset = plan.document_offsets[tasks.document]
    q_rows = q_served.of(offset + tasks.q_start, offset + tasks.q_end)
    kv_rows = kv_served.of(offset + tasks.kv_start, offset + tasks.kv_end)
    first, repeated = _first_and_repeated(q_rows, produced)
    return KernelCall(
        causal=causal,
        cu_seqlens_q=_cu_seqlens(tasks.q_end - tasks.q_start),
        cu_seqlens_kv=_cu_seqlens(tasks.kv_end - tasks.kv_start),
        q_rows=_unless_identity(q_rows, q.served),
        kv_rows=_unless_identity(kv_rows, kv.served),
        first_q=_unless_identity(first, len(q_rows)),
        repeated_q=tuple(torch.from_numpy(part) for part in repeated),
    )


def _first_and_repeated(rows: Int64s, produced: np.ndarray) -> tuple[Int64s, list[Int64s]]:
    """Splits `rows` by how often each has been produced before; updates `produced`."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    opens = np.ones(len(rows), dtype=bool)
    opens[1:] = ordered[1:] != ordered[:-1]
    positions = np.arange(len(rows))
    occurrence = positions - np.maximum.accumulate(np.where(opens, positions, 0))
    times = np.empty(len(rows), dtype=np.int64)
    times[order] = occurrence + produced[ordered]
    produced[rows] = True
    last = int(times.max()) if len(times) else 0
    return np.flatnonzero(times == 0), [
        part for n in range(1, last + 1) if len(part := np.flatnonzero(times == n))
    ]


def _cu_seqlens(lengths: Int64s) -> torch.Tensor:
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return torch.from_numpy(ends)


def _unless_identity(rows: Int64s, total: int) -> torch.Tensor | None:
    if len(rows) == total and np.array_equal(rows, np.arange(total)):
        return None
    return torch.from_numpy(rows)


def _arrivals(q: Rows, computed_here: np.ndarray, rank: int) -> tuple[Arrival, ...]:
    """Splits the outputs that come back, server by server, into first and repeated rows."""
    arrived = computed_here.copy()
    arrivals = []
    row = 0
    for server, count in enumerate(q.send_counts):
        rows = q.send.numpy()[row : row + count]
        row += count
        if count:
            new = ~arrived[rows]
            arrived[rows] = True
            arrivals.append(
                Arrival(
                    server,
                    torch.from_numpy(np.flatnonzero(new)),
                    torch.from_numpy(np.flatnonzero(~new)),
                )
            )
    assert arrived.all(), f"rank {rank} owns a query that no server computes"
    return tuple(arrivals)
