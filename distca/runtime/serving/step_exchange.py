"""One rank's part of a plan with steps, forward alone: messages and kernel calls of each step.

Row numbers, all on this rank, in every step:

* a *local* row is a token that this rank owns, in the order of its placement;
* an *arrived* row is one that it received for the step, in the order (source, position), which is
  also the order of messages. Queries that arrived are numbered behind the local ones.

All full rectangles of the same queries in a step are one kernel sequence, with a diagonal square
behind them if there is one, and queries that see the same keys are one sequence, too. Of a prompt
that goes round a ring that makes one rectangle a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from distca.cost.rows import sent_rows
from distca.cost.volume import Messages
from distca.plan import Mask, Plan, Segments, SteppedPlan, Tasks
from distca.plan.span import Bools, Int64s, cut_at, distinct, expand_ranges
from distca.plan.stepped import StepSegments
from distca.runtime.exchange import map_indices, sent_by
from distca.runtime.messages import MessageLayout, PeerRows, RowTypes, message_layout, peer_rows

Index = slice | torch.Tensor
"""Rows of a tensor: consecutive ones, or those with these numbers, int64."""


@dataclass(frozen=True)
class Part:
    """Some of the key rows that are needed: of those that arrived, or else of the local ones."""

    arrived: bool
    rows: Index


@dataclass(frozen=True)
class StepCall:
    """One kernel call: sequences of one task shape, of different queries.

    Attributes:
        causal: whether they end on the diagonal; otherwise they are full rectangles.
        queries: query rows, local or arrived, one sequence after the other.
        keys: key rows, likewise: local ones, then arrived ones.
        order: order of these rows in the sequences, int64; None: as they are.
        cu_seqlens_q: first query of each sequence, and the total: int32 `[sequences + 1]`, CPU.
        cu_seqlens_kv: first key of each sequence, and the total, likewise.
        first: whether no other call had these queries before.
    """

    causal: bool
    queries: Index
    keys: tuple[Part, ...]
    order: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    first: bool


@dataclass(frozen=True)
class StepMessages:
    """Rows that this rank exchanges in one phase of a step.

    Attributes:
        outgoing: rows of queries, and of keys, that it sends.
        incoming: rows that it receives, likewise.
        move: whether any rank sends any row; the same on every rank.
    """

    outgoing: tuple[PeerRows, PeerRows]
    incoming: tuple[PeerRows, PeerRows]
    move: bool

    def layout(self, types: RowTypes) -> MessageLayout:
        """Returns the messages that hold rows of such tensors, the same for all layers."""
        if types not in self._layouts:
            self._layouts[types] = message_layout(self.outgoing, self.incoming, types)
        return self._layouts[types]

    @cached_property
    def _layouts(self) -> dict[RowTypes, MessageLayout]:
        return {}


@dataclass(frozen=True)
class ExchangeStep:
    """One step of a rank's part.

    Attributes:
        dispatch: rows on their way to servers.
        send_q: query rows to send, of the step before if they arrived, sorted by destination.
        send_kv: key rows to send, likewise, from one place after the other.
        calls: kernel calls.
        combine: outputs on their way to the queries' owners.
        results: arrived queries whose outputs are sent back, sorted by owner, then position.
        returned: local queries whose outputs come back, from one server after the other.
    """

    dispatch: StepMessages
    send_q: Index
    send_kv: tuple[Part, ...]
    calls: tuple[StepCall, ...]
    combine: StepMessages
    results: Index
    returned: tuple[Index, ...]

    @property
    def arrived_queries(self) -> int:
        """Queries that this rank receives for the step."""
        return self.dispatch.incoming[0].place[0].shape[0]


@dataclass(frozen=True)
class SteppedExchange:
    """Everything that one rank needs to run a plan's steps.

    Attributes:
        rank: number of this rank.
        mask: visible keys of a query.
        queries: query rows that it owns.
        keys: key rows that it owns.
        steps: steps of the plan, as this rank sees them.
        head_groups: rows that each token has: see `distca.runtime.serving.stepped_call`.
    """

    rank: int
    mask: Mask
    queries: int
    keys: int
    steps: tuple[ExchangeStep, ...]
    head_groups: int

    @property
    def tokens(self) -> int:
        """Tokens of its queries."""
        return self.queries // self.head_groups

    @property
    def served_queries(self) -> int:
        """Room for the local queries and those that arrive for a step."""
        return self.queries + max(step.arrived_queries for step in self.steps)

    def map_indices(self, function: Callable[[torch.Tensor], torch.Tensor]) -> SteppedExchange:
        """Replaces every tensor of row indices by its image (`cu_seqlens` stay on the CPU)."""
        return map_indices(self, function)


def build_stepped_exchange(
    stepped: SteppedPlan, rank: int, key_places: Int64s | None = None
) -> SteppedExchange:
    """Works out one rank's part of a plan.

    Args:
        stepped: a valid plan.
        rank: rank of the plan's placement, which is a server, too.
        key_places: where each local key row lies, as a row of the tensors that layers give, int64
            `[local key rows]`; None: in order.
    """
    plan = stepped.plan
    local = _Local(
        rank,
        plan.own_tokens_per_rank(),
        plan.placement.tokens_per_rank(),
        key_places,
    )
    # Rows that a call or a return has given outputs to, behind the local ones those that arrive.
    seen = np.zeros(local.queries, dtype=bool)
    steps: list[ExchangeStep] = []
    for number, segments in enumerate(stepped.step_segments):
        tasks = plan.tasks[(stepped.step == number) & (plan.tasks.server == rank)]
        steps.append(_step(plan, tasks, segments, local, seen))
        # Outputs of a step return while the next is computed: see `step_program`.
        if number > 0:
            for rows in steps[number - 1].returned:
                seen[rows] = True
    whole = local.queries, local.keys, tuple(steps)
    return SteppedExchange(rank, plan.mask, *whole, plan.head_groups)


class _Local:
    """The rows that this rank owns.

    Args:
        rank: this rank.
        q_rows: query rows that each rank owns, int64 `[ranks]`.
        kv_rows: key rows that each rank owns, likewise.
        key_places: see `build_stepped_exchange`.
    """

    def __init__(
        self, rank: int, q_rows: Int64s, kv_rows: Int64s, key_places: Int64s | None
    ) -> None:
        self.rank, self.q_rows, self.kv_rows = rank, q_rows, kv_rows
        self.queries, self.keys = int(q_rows[rank]), int(kv_rows[rank])
        self._places = np.arange(self.keys) if key_places is None else key_places
        assert len(self._places) == self.keys, "each local key row has a place"

    def part(self, rows: Int64s, arrived: bool) -> Part:
        """Key rows that are all local or all arrived, by their served numbers."""
        return Part(arrived, index_of(rows - self.keys if arrived else self._places[rows]))

    def parts(self, rows: Int64s) -> tuple[Part, ...]:
        """Key rows in their order."""
        arrived = rows >= self.keys
        runs = np.split(rows, np.flatnonzero(np.diff(arrived)) + 1)
        return tuple(self.part(run, bool(run[0] >= self.keys)) for run in runs if len(run))


class _Served:
    """Finds rows of one kind by global positions: local ones, and behind them those that arrive."""

    def __init__(self, segments: Segments, rank: int, local: Int64s) -> None:
        mine = segments.server == rank
        start, end = segments.start[mine], segments.end[mine]
        row, order = segments.served_rows(local)[mine], np.argsort(start)
        self._start, self._end, self._row = start[order], end[order], row[order]

    def of(self, starts: Int64s, ends: Int64s) -> Int64s:
        """Returns the rows of the spans, one span after the other, int64."""
        if not (ends > starts).any():
            return np.zeros(0, dtype=np.int64)
        segment = np.searchsorted(self._start, starts, side="right") - 1
        if len(starts) == 1 and ends[0] <= self._end[segment[0]]:
            # Most spans lie in one segment.
            first = self._row[segment[0]] + starts[0] - self._start[segment[0]]
            return np.arange(first, first + ends[0] - starts[0])
        _, starts, ends = cut_at(starts, ends, self._start)
        segment = np.searchsorted(self._start, starts, side="right") - 1
        return expand_ranges(self._row[segment] + starts - self._start[segment], ends - starts)


@dataclass(frozen=True)
class _Sequence:
    """A kernel sequence: rows by their served numbers."""

    causal: bool
    queries: Int64s
    keys: Int64s


def _step(
    plan: Plan, tasks: Tasks, segments: StepSegments, local: _Local, seen: Bools
) -> ExchangeStep:
    rank, ranks = local.rank, plan.world_size
    # Sizes of these messages are rows.
    q, kv, outputs = (Messages(*each.moved(), ranks) for each in segments)
    queries = _Served(segments.q, rank, local.q_rows)
    keys = _Served(segments.kv, rank, local.kv_rows)
    arrived = np.zeros(int(q.received()[rank]), dtype=bool)
    sequences = [*_merged(_sequences(plan, tasks, queries, keys, local.keys))]
    calls = []
    for causal in (True, False):
        alike = [each for each in sequences if each.causal == causal]
        for of_call in _batches(alike, local.keys):
            rows = np.concatenate([each.queries for each in of_call])
            given = np.concatenate([seen, arrived])
            first = not given[rows].any()
            given[rows] = True
            seen[:], arrived[:] = given[: len(seen)], given[len(seen) :]
            calls.append(_call(of_call, rows, local, first))
    mine = segments.outputs.select(
        (segments.outputs.server == rank) & (segments.outputs.owner != rank)
    )
    results = queries.of(mine.start, mine.end)
    theirs = segments.outputs.select(
        (segments.outputs.server != rank) & (segments.outputs.owner == rank)
    )
    by_server = [theirs.select(theirs.server == each) for each in distinct(theirs.server)]
    return ExchangeStep(
        dispatch=step_messages(rank, q, kv),
        send_q=index_of(sent_rows(segments.q, rank)),
        send_kv=local.parts(sent_rows(segments.kv, rank)),
        calls=tuple(calls),
        combine=step_messages(rank, outputs.back, replace(outputs, sizes=0 * outputs.sizes)),
        results=index_of(results),
        returned=tuple(index_of(expand_ranges(each.owner_row, each.lengths)) for each in by_server),
    )


def step_messages(rank: int, q: Messages, kv: Messages) -> StepMessages:
    """Messages of rows of each kind, as one rank sees them."""
    return StepMessages(
        peer_rows(*sent_by(rank, q), *sent_by(rank, kv)),
        peer_rows(*sent_by(rank, q.back), *sent_by(rank, kv.back)),
        bool(q.sizes.any() or kv.sizes.any()),
    )


def _sequences(
    plan: Plan, tasks: Tasks, queries: _Served, keys: _Served, local_keys: int
) -> Iterator[_Sequence]:
    """Kernel sequences of the tasks of each query span in turn."""
    offset = plan.document_offsets[tasks.document]
    q_start, q_end = offset + tasks.q_start, offset + tasks.q_end
    kv_start, kv_end = offset + tasks.kv_start, offset + tasks.kv_end
    # Without a window what a task sees before its square is a full rectangle, too.
    square = np.where(tasks.ends_on_diagonal, np.maximum(kv_start, q_start), kv_end)
    if plan.mask.window_left is not None:
        square = np.where(tasks.ends_on_diagonal, kv_start, kv_end)
    order = np.lexsort((kv_start, q_end, q_start))
    changes = (np.diff(q_start[order]) != 0) | (np.diff(q_end[order]) != 0)
    for of_span in np.split(order, np.flatnonzero(changes) + 1):
        if not len(of_span):
            continue
        q = queries.of(q_start[of_span[:1]], q_end[of_span[:1]])
        full = keys.of(kv_start[of_span], square[of_span])
        by_place = [full, full]
        if len(full):
            arrived = full >= local_keys
            by_place = [full[~arrived], full[arrived]]
        for task in of_span[tasks.ends_on_diagonal[of_span]]:
            rows = keys.of(square[[task]], kv_end[[task]])
            arrived = rows >= local_keys
            begins = plan.mask.window_left is None and square[task] == q_start[task]
            if begins and (arrived == arrived[0]).all():
                place = int(arrived[0])
                rows = np.concatenate([by_place[place], rows])
                by_place[place] = rows[:0]
            yield _Sequence(True, q, rows)
        for rows in by_place:
            if len(rows):
                yield _Sequence(False, q, rows)


def _merged(sequences: Iterator[_Sequence]) -> Iterator[_Sequence]:
    """Joins full rectangles over the same keys."""
    over: dict[bytes, list[_Sequence]] = {}
    for each in sequences:
        if each.causal:
            yield each
        else:
            over.setdefault(each.keys.tobytes(), []).append(each)
    for alike in over.values():
        yield _Sequence(False, np.concatenate([each.queries for each in alike]), alike[0].keys)


def _batches(sequences: list[_Sequence], local_keys: int) -> list[list[_Sequence]]:
    """Sequences of each kernel call: all, if none of their rows need be copied, else each alone."""
    ordered = sorted(sequences, key=lambda each: int(each.queries[0]))
    if not ordered:
        return []
    queries = np.concatenate([each.queries for each in ordered])
    keys = np.concatenate([each.keys for each in ordered])
    in_turn = (np.diff(keys) == 1).all() and ((keys < local_keys) == (keys[0] < local_keys)).all()
    if in_turn and len(distinct(queries)) == len(queries):
        return [ordered]
    return [[each] for each in ordered]


def _call(sequences: list[_Sequence], rows: Int64s, local: _Local, first: bool) -> StepCall:
    keys = np.concatenate([each.keys for each in sequences])
    # Local rows first, then those that arrived; within each as they are.
    by_place = np.argsort(keys >= local.keys, kind="stable")
    order = None if (np.diff(by_place) == 1).all() else torch.from_numpy(np.argsort(by_place))
    lengths = [[len(each.queries), len(each.keys)] for each in sequences]
    edges = np.zeros((2, len(sequences) + 1), dtype=np.int32)
    np.cumsum(np.array(lengths).T, axis=1, out=edges[:, 1:])
    return StepCall(
        sequences[0].causal,
        index_of(rows),
        local.parts(keys[by_place]),
        order,
        torch.from_numpy(edges[0]),
        torch.from_numpy(edges[1]),
        first,
    )


def index_of(rows: Int64s) -> Index:
    """Returns the rows as a slice, if they are consecutive."""
    if not len(rows):
        return slice(0, 0)
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
