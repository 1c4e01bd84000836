"""One rank's part of a plan: messages on the wire, and rows and offsets of kernel calls.

Every rank computes its exchange from the plan alone, once. Sender and receiver agree on every size
and offset because both read them off the same segments. Nothing is ever negotiated.

Row numbers, all on this rank:

* a *local* row is a token that this rank owns, in the order of its placement (those of cached
  prefixes have keys and values alone);
* a *served* row is a token that this rank needs as a server: its local rows first, all of them,
  then the received rows in the order (owner, position). Either kind stays in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import TypeVar, cast

import numpy as np
import torch

from distca.attention.merge import LseMerge, Sums, lse_merge, sums_by_row
from distca.cost.rows import KindRows, copied_in_pieces, rows_of_kinds, sent_rows
from distca.cost.volume import Messages
from distca.plan import Mask, Plan, Tasks
from distca.plan.span import Bools, Int64s
from distca.runtime.messages import MessageLayout, PeerRows, RowTypes, message_layout, peer_rows
from distca.transport import Direction

Value = TypeVar("Value")


@dataclass(frozen=True)
class Piece:
    """Rows that follow each other in one memory.

    Attributes:
        received: whether they are among the received rows, and not among the local ones.
        rows: their numbers there.
    """

    received: bool
    rows: slice


@dataclass(frozen=True)
class Gather:
    """Rows of one memory.

    Attributes:
        received: whether they are among the received rows, and not among the local ones.
        rows: their numbers there, int64 `[n]`.
    """

    received: bool
    rows: torch.Tensor


@dataclass(frozen=True)
class Pieces:
    """Pieces of both memories, one after the other.

    Attributes:
        pieces: the pieces.
        served: numbers of all rows among the served rows, int64 `[n]`, for kernels that take both
            memories at once.
    """

    pieces: tuple[Piece, ...]
    served: torch.Tensor

    @property
    def total(self) -> int:
        """Number of rows."""
        return sum(each.rows.stop - each.rows.start for each in self.pieces)


@dataclass(frozen=True)
class GatherBoth:
    """Rows of both memories, gathered because they lie in many pieces.

    Attributes:
        most: rows of the memory that holds most of them; any row stands in for each other one.
        others: rows of the other memory, which take the places of those.
        places: numbers of the others among all rows, int64.
        served: numbers of all rows among the served rows, int64 `[n]`, for kernels that take both
            memories at once.
    """

    most: Gather
    others: Gather
    places: torch.Tensor
    served: torch.Tensor


CallRows = Piece | Gather | Pieces | GatherBoth
"""Rows of a call, one task after the other. Those of one piece are used where they lie."""


@dataclass(frozen=True)
class Rows:
    """Rows of one kind (queries, or keys and values), as they travel to the servers and back.

    Attributes:
        local: rows that this rank owns.
        send: local rows to send, sorted by destination, int64 `[sent]`.
        outgoing: rows that this rank sends to the servers, and that they return.
        incoming: rows that this rank receives as a server, and returns.
        parts: number of row gradients that this rank's kernel calls compute.
        received_sums: sums `parts` to the gradients of the received rows; None: the last of `parts`
            are these gradients.
        local_sums: sums `parts`, followed by the returned gradients, to the gradients of the local
            rows; None: the first of `parts` are these gradients.
        move: whether any rank sends any row; the same on every rank.
        returned_sums: sums the returned gradients to those of the local latents; `local_sums`
            then leaves them out. None: no latents are sent.
    """

    local: int
    send: torch.Tensor
    outgoing: PeerRows
    incoming: PeerRows
    parts: int
    received_sums: Sums | None
    local_sums: Sums | None
    move: bool
    returned_sums: Sums | None = None

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

    @property
    def computed_alone(self) -> bool:
        """Whether the parts of the one kernel call are the results of the local rows, no more."""
        return self.local_sums is None and not self.received


@dataclass(frozen=True)
class KernelCall:
    """One fused variable-length kernel call: all tasks of one shape of this server.

    Attributes:
        causal: whether the tasks end on the diagonal; otherwise they are full rectangles.
        queries: query rows of all tasks.
        keys: key rows of all tasks.
        cu_seqlens_q: first query of each task, and the total: int32 `[tasks + 1]` on the CPU.
        cu_seqlens_kv: first key of each task, and the total, likewise.
        q_rows: where the tasks' query rows lie, one task after the other.
        kv_rows: where their keys and values lie, likewise.
    """

    causal: bool
    queries: int
    keys: int
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    q_rows: CallRows
    kv_rows: CallRows


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
        received_outputs: merges the outputs of all calls to those of the received queries; None:
            the last outputs of the only call are these.
        local_outputs: merges the outputs of all calls, followed by the returned ones, to those of
            the local queries; None: the first outputs of the only call are these.
    """

    rank: int
    world_size: int
    mask: Mask
    q: Rows
    kv: Rows
    calls: tuple[KernelCall, ...]
    received_outputs: LseMerge | None
    local_outputs: LseMerge | None

    @property
    def output_rows(self) -> int:
        """Rows of memory for outputs: those of all calls, those returned, and room for merging."""
        both = (each for each in (self.received_outputs, self.local_outputs) if each is not None)
        return max((each.with_merged for each in both), default=self.q.parts)

    def layout(self, direction: Direction, types: RowTypes) -> MessageLayout:
        """Returns the messages in a direction that hold rows of such tensors.

        They are laid out once: all layers have the same.
        """
        key = direction, types
        if key not in self._layouts:
            outgoing = self.q.outgoing, self.kv.outgoing
            incoming = self.q.incoming, self.kv.incoming
            sides = (outgoing, incoming) if direction == "dispatch" else (incoming, outgoing)
            self._layouts[key] = message_layout(*sides, types)
        return self._layouts[key]

    @cached_property
    def _layouts(self) -> dict[tuple[Direction, RowTypes], MessageLayout]:
        return {}

    def map_indices(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Exchange:
        """Replaces every tensor of row indices by its image (`cu_seqlens` stay on the CPU)."""
        # A copy in any case, whose messages are laid out anew.
        return replace(map_indices(self, function))


def map_indices(value: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """Replaces every int64 tensor in dataclasses and tuples by its image."""
    if isinstance(value, torch.Tensor):
        return cast(Value, function(value)) if value.dtype == torch.int64 else value
    if isinstance(value, tuple):
        return cast(Value, tuple(map_indices(each, function) for each in value))
    changed = {}
    for name in _field_names(type(value)):  # type: ignore[arg-type]
        before = getattr(value, name)
        after = map_indices(before, function)
        if after is not before:
            changed[name] = after
    return replace(value, **changed) if changed else value  # type: ignore[type-var]


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Fields of a dataclass that may have tensors; other types have none.

    A step maps many values of few types.
    """
    plain = ("int", "bool", int, bool)
    if not is_dataclass(kind):
        return ()
    return tuple(each.name for each in fields(kind) if each.type not in plain)


def build_exchange(plan: Plan, rank: int, latents: bool = False) -> Exchange:
    """Works out one rank's part of a plan.

    Args:
        plan: a valid plan.
        rank: rank of the plan's placement, which is a server, too.
        latents: whether latents travel instead of keys and values.
    """
    world_size = plan.world_size
    kinds = rows_of_kinds(plan, rank)
    # Sizes of these messages are rows.
    moved_q, moved_kv = (Messages(*each.segments.moved(), world_size) for each in kinds)
    outgoing = peer_rows(*sent_by(rank, moved_q), *sent_by(rank, moved_kv))
    incoming = peer_rows(*sent_by(rank, moved_q.back), *sent_by(rank, moved_kv.back))
    tasks = plan.tasks[plan.tasks.server == rank]
    causal_tasks = tasks.ends_on_diagonal
    shapes = [shape for shape in (False, True) if (causal_tasks == shape).any()]
    q_served, kv_served = (
        _served_rows(kind, rank, moved.received(), shapes)
        for kind, moved in zip(kinds, (moved_q, moved_kv), strict=True)
    )
    calls = [
        _kernel_call(
            tasks[causal_tasks == causal],
            causal,
            find_call_rows(q, q_served.local),
            find_call_rows(kv, kv_served.local),
        )
        for causal, q, kv in zip(shapes, q_served.calls, kv_served.calls, strict=True)
    ]
    of_q, of_kv = _parts(q_served), _parts(kv_served, not latents)
    q = _rows(q_served, of_q, outgoing[0], incoming[0], bool(moved_q.sizes.any()))
    kv = _rows(kv_served, of_kv, outgoing[1], incoming[1], bool(moved_kv.sizes.any()))
    if latents and kv.sent:
        kv = replace(kv, returned_sums=sums_by_row(kv_served.send, kv.local))
    return Exchange(
        rank=rank,
        world_size=world_size,
        mask=plan.mask,
        q=q,
        kv=kv,
        calls=tuple(calls),
        received_outputs=None if of_q.received is None else lse_merge(of_q.received, q.received),
        local_outputs=None if of_q.local is None else lse_merge(of_q.local, q.local),
    )


def sent_by(rank: int, moved: Messages) -> tuple[Int64s, Int64s]:
    """Returns, for each destination, the rows that a rank sends and those that lower ranks send."""
    mine, lower = (
        replace(moved, sizes=moved.sizes * which)
        for which in (moved.source == rank, moved.source < rank)
    )
    return mine.received(), lower.received()


@dataclass(frozen=True)
class _ServedRows:
    """Row numbers of one kind on this rank.

    Attributes:
        local: number of rows that it owns.
        received: number of rows that arrive.
        send: local rows to send, sorted by destination, int64.
        calls: served rows that each kernel call takes, int64.
        in_order: whether one call takes all served rows in their order.
    """

    local: int
    received: int
    send: Int64s
    calls: tuple[Int64s, ...]
    in_order: bool


def _served_rows(kind: KindRows, rank: int, received: Int64s, shapes: list[bool]) -> _ServedRows:
    spans = kind.call_spans()
    return _ServedRows(
        int(kind.local[rank]),
        int(received[rank]),
        sent_rows(kind.segments, rank),
        tuple(spans.rows(causal) for causal in shapes),
        bool(spans.in_order(kind.local + received)[rank]),
    )


def _kernel_call(tasks: Tasks, causal: bool, q_rows: CallRows, kv_rows: CallRows) -> KernelCall:
    queries, keys = tasks.q_end - tasks.q_start, tasks.kv_end - tasks.kv_start
    return KernelCall(
        causal,
        int(queries.sum()),
        int(keys.sum()),
        _cu_seqlens(queries),
        _cu_seqlens(keys),
        q_rows,
        kv_rows,
    )


def _cu_seqlens(lengths: Int64s) -> torch.Tensor:
    ends = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    return torch.from_numpy(ends)


@dataclass(frozen=True)
class _Parts:
    """Row that each part belongs to: parts of all kernel calls, one after the other, below 0: none.

    Attributes:
        number: number of the calls' parts.
        received: received rows; None: they are the last parts.
        local: local rows, also of parts that are returned; None: they are the first parts, and none
            are returned.
    """

    number: int
    received: Int64s | None
    local: Int64s | None


def _parts(served: _ServedRows, come_back: bool = True) -> _Parts:
    """Returns the parts of rows of one kind.

    Args:
        served: rows of the kind.
        come_back: whether parts of the rows that are sent come back.
    """
    computed = np.concatenate([np.zeros(0, dtype=np.int64), *served.calls])
    returned = served.send if come_back else served.send[:0]
    alone = served.in_order and not len(returned)
    own = np.concatenate([np.where(computed < served.local, computed, -1), returned])
    received = None if served.in_order else computed - served.local
    return _Parts(len(computed), received, None if alone else own)


def _rows(
    served: _ServedRows,
    parts: _Parts,
    outgoing: PeerRows,
    incoming: PeerRows,
    move: bool,
) -> Rows:
    return Rows(
        served.local,
        torch.from_numpy(served.send),
        outgoing,
        incoming,
        parts.number,
        None if parts.received is None else sums_by_row(parts.received, served.received),
        None if parts.local is None else sums_by_row(parts.local, served.local),
        move,
    )


def find_call_rows(served: Int64s, local: int) -> CallRows:
    """Finds rows of a call in memory, as `distca.cost.rows.CallRowCounts` counts them.

    Args:
        served: served rows of the call's tasks, one task after the other: local rows have their own
            numbers, received ones begin at `local`.
        local: number of local rows.
    """
    total, received = len(served), served >= local
    at = served - local * received
    ends = np.flatnonzero((np.diff(served) != 1) | np.diff(received)) + 1
    edges = [0, *ends.tolist(), total]
    if len(edges) == 2:
        return _piece(at, received, 0, total)
    if received.all() or not received.any():
        return Gather(bool(received[0]), torch.from_numpy(at))
    if copied_in_pieces(np.array(len(edges) - 1), np.array(total)):
        pieces = tuple(_piece(at, received, *span) for span in pairwise(edges))
        return Pieces(pieces, torch.from_numpy(served))
    mostly = bool(2 * received.sum() > total)
    others = np.flatnonzero(received != mostly)
    return GatherBoth(
        Gather(mostly, torch.from_numpy(np.where(received == mostly, at, 0))),
        Gather(not mostly, torch.from_numpy(at[others])),
        torch.from_numpy(others),
        torch.from_numpy(served),
    )


def _piece(at: Int64s, received: Bools, begin: int, end: int) -> Piece:
    first, is_received = (int(at[begin]), bool(received[begin])) if begin < end else (0, False)
    return Piece(is_received, slice(first, first + end - begin))
