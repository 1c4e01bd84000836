"""Core attention in the steps of a plan, forward alone: rows travel while servers compute.

Kernels read keys and values in the transport's buffers, where they arrived, and those that a rank
owns where they lie. Partial outputs merge into one sum, step by step.

Where heads are scattered, a plan's documents are head groups of sequences, and a token has a row
for each group. Queries and outputs are ordered by group, then token. Keys and values stay where
they lie: a token's heads lie side by side, so its rows of the groups do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from distca.attention.kernel import KernelTasks, Outputs
from distca.attention.merge import merge_rows
from distca.attention.sink import with_sink
from distca.cost.steps import STEP_SLOTS
from distca.plan.span import Int64s
from distca.runtime.core_attention import CoreAttention
from distca.runtime.messages import WORD, KindLayout, PackedRows, QAndKV, RowTypes
from distca.runtime.serving.importance import Importance
from distca.runtime.serving.step_exchange import (
    Index,
    Part,
    StepCall,
    StepMessages,
    SteppedExchange,
)
from distca.schedule.serving.steps import StepEvent, step_program
from distca.transport import Channel, Direction, Pending

Fill = Callable[[Sequence[torch.Tensor]], object]
"""Writes rows of each tensor of a kind."""


def attend_in_steps(
    core: CoreAttention,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    exchange: SteppedExchange,
    softmax_scale: float,
    sink_H: torch.Tensor | None = None,
    importance: Importance | None = None,
) -> torch.Tensor:
    """Core attention of the local queries, computed by the plan's servers. Collective.

    Args:
        core: transport, kernel and buffers, in which `distca.cost.steps.step_memory` is reserved.
        q_THD: local queries, `[local rows, heads, head_dim]`.
        k_THD: keys, `[rows, kv_heads, head_dim]`: the local ones at the exchange's places, which
            with head groups are those of `key_places`.
        v_THD: like `k_THD`.
        exchange: this rank's part of the plan.
        softmax_scale: factor of the scores.
        sink_H: one more logit of each head, which has no value, `[heads]`, or None.
        importance: what takes in which keys are important; None: nobody asks.

    Returns:
        The output, `[local rows, heads, head_dim]`.

    Raises:
        ValueError: there are other queries than the plan places on this rank.
    """
    if q_THD.shape[0] != exchange.tokens:
        raise ValueError(
            f"q has {q_THD.shape[0]} rows, but the plan places {exchange.tokens} queries on rank "
            f"{exchange.rank}"
        )
    groups = exchange.head_groups
    keys = [key_rows(each, groups) for each in (k_THD, v_THD)]
    tensors = QAndKV([query_rows(q_THD, groups)], keys)
    call = SteppedCall(core, exchange, tensors, softmax_scale)
    out, lse = call.run(importance)
    out = token_rows(out, groups)
    if sink_H is not None:
        out, _ = with_sink(out, token_rows(lse.unsqueeze(-1), groups).squeeze(-1), sink_H)
    return out.to(q_THD.dtype)


def query_rows(q_THD: torch.Tensor, groups: int) -> torch.Tensor:
    """Puts groups of heads behind each other: `[groups * tokens, heads / groups, head_dim]`."""
    if groups == 1:
        return q_THD
    tokens, heads, dim = q_THD.shape
    return q_THD.view(tokens, groups, heads // groups, dim).transpose(0, 1).flatten(0, 1)


def token_rows(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Puts groups of heads beside each other again, the inverse of `query_rows`."""
    if groups == 1:
        return rows
    count, heads, dim = rows.shape
    return rows.view(groups, count // groups, heads, dim).transpose(0, 1).flatten(1, 2)


def key_rows(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Views `[places, kv_heads, head_dim]` as rows of one group's heads each."""
    parts = min(groups, rows.shape[1])
    return rows.view(rows.shape[0] * parts, rows.shape[1] // parts, rows.shape[2])


def key_places(places: Int64s, groups: int, kv_heads: int) -> Int64s:
    """Returns where rows of `key_rows` lie, group by group: groups may have the same head.

    Args:
        places: where each token's keys lie, int64 `[tokens]`.
        groups: head groups.
        kv_heads: heads of keys and values.
    """
    parts = min(groups, kv_heads)
    part = np.arange(groups) * parts // groups
    return (places * parts + part[:, None]).ravel()


class SteppedCall:
    """One call of core attention in steps, which a program's events lead through.

    Args:
        core: transport, kernel and buffers.
        exchange: this rank's part of the plan.
        tensors: local queries; keys and values.
        softmax_scale: factor of the scores.
    """

    def __init__(
        self,
        core: CoreAttention,
        exchange: SteppedExchange,
        tensors: QAndKV,
        softmax_scale: float,
    ) -> None:
        self._core, self._exchange = core, exchange
        self._scale, self._keys = softmax_scale, tensors.kv
        (q,) = tensors.q
        self._types = tensors.row_types
        self._dtype, rows = q.dtype, exchange.served_queries
        # Queries that arrive lie behind the local ones.
        self._q = q
        if rows > len(q):
            self._q = q.new_empty((rows, *q.shape[1:]))
            self._q[: len(q)] = q
        sums = torch.promote_types(q.dtype, torch.float32)
        self._out = q.new_zeros(self._q.shape, dtype=sums)
        self._lse = q.new_full(self._q.shape[:2], float("-inf"), dtype=torch.float32)
        self._arrived: Sequence[torch.Tensor] = ()
        self._dispatched: dict[int, Pending] = {}
        self._returned: dict[int, Pending] = {}

    def run(self, importance: Importance | None) -> Outputs:
        """Does all events; returns what `outputs` does."""
        for event in step_program(len(self._exchange.steps)):
            self.do(event)
        if importance is not None:
            q = self._q[: self._exchange.queries]
            importance.update(q, self._keys[0], self.outputs()[1], self._scale)
        return self.outputs()

    def do(self, event: StepEvent) -> None:
        """Does an event of the program, whose turn it is."""
        getattr(self, event.action)(event.step)

    def outputs(self) -> Outputs:
        """Returns the outputs and LSE of the local queries, after the last event, in float32."""
        local = slice(0, self._exchange.queries)
        return self._out[local], self._lse[local]

    def dispatch(self, number: int) -> None:
        """Starts the exchange of a step's rows."""
        step = self._exchange.steps[number]
        if step.dispatch.move:
            with self._span("dispatch", "exchange", number):
                self._dispatched[number] = self._start(
                    "dispatch",
                    "dispatch",
                    number,
                    step.dispatch,
                    self._types,
                    self._fills(number),
                )

    def receive(self, number: int) -> None:
        """Waits for the rows of a step."""
        step = self._exchange.steps[number]
        self._arrived = ()
        if number not in self._dispatched:
            return
        with self._span("wait for dispatch", "exchange", number):
            messages = self._dispatched[number].wait().view(WORD)
        of_q, of_kv = step.dispatch.layout(self._types).receive
        if of_q.rows:
            rows = slice(self._exchange.queries, self._exchange.queries + of_q.rows)
            of_q.take_apart(messages, [self._q[rows]])
            self._out[rows], self._lse[rows] = 0.0, float("-inf")
        if of_kv.rows:
            self._arrived = _received(of_kv, messages)

    def compute(self, number: int) -> None:
        """Runs the kernels of a step, and starts the return of what they give for other ranks."""
        step = self._exchange.steps[number]
        with self._span("core attention", "kernels", number):
            self._kernels(number)
        if step.combine.move:
            with self._span("combine", "exchange", number):
                fills = self._fill_results(step.results), nothing_to_fill
                self._returned[number] = self._start(
                    "combine", "combine", number, step.combine, self._result_types, fills
                )
        # Keys were read where they arrived.
        if number in self._dispatched:
            self._dispatched.pop(number).release()

    def _kernels(self, number: int) -> None:
        for call in self._exchange.steps[number].calls:
            self._run(call)

    def combine(self, number: int) -> None:
        """Waits for the outputs of a step that return, and merges them."""
        pending = self._returned.pop(number, None)
        if pending is None:
            return
        step = self._exchange.steps[number]
        with self._span("wait for combine", "exchange", number):
            messages = pending.wait().view(WORD)
        layout, _ = step.combine.layout(self._result_types).receive
        begin, results = 0, _received(layout, messages)
        for rows in step.returned:
            end = begin + _length(rows)
            merge_rows(self._out, self._lse, rows, *(each[begin:end] for each in results))
            begin = end
        pending.release()

    def _span(self, name: str, lane: str, number: int) -> AbstractContextManager[None]:
        return self._core.trace.span(name, lane, step=number)

    @property
    def _result_types(self) -> RowTypes:
        shape = self._q.shape[1:]
        return ((shape, self._dtype), (shape[:1], torch.float32)), ()

    def _start(
        self,
        phase: str,
        direction: Direction,
        number: int,
        exchanged: StepMessages,
        types: RowTypes,
        fills: Sequence[Fill],
    ) -> Pending:
        channel, layout = Channel(direction, number % STEP_SLOTS), exchanged.layout(types)
        transport = self._core.transport
        messages = transport.staging(channel, layout.sizes.sent).view(WORD)
        for kind, fill in zip(layout.send, fills, strict=True):
            if not kind.rows:
                continue
            if kind.place is None:
                fill(PackedRows.at(kind.in_place(messages), kind.format).tensors)
            else:
                rows = PackedRows.at(_words(kind, messages), kind.format)
                fill(rows.tensors)
                kind.put(messages, rows.words)
        return transport.start(phase, channel, layout.sizes)

    def _fills(self, number: int) -> tuple[Fill, Fill]:
        """What writes the queries, and the keys, that this rank sends in a step."""
        step = self._exchange.steps[number]
        return self._fill_q(step.send_q), self._fill_kv(step.send_kv)

    def _fill_q(self, rows: Index) -> Fill:
        return lambda into: _copy(self._q, rows, into[0])

    def _fill_kv(self, parts: Sequence[Part]) -> Fill:
        def fill(into: Sequence[torch.Tensor]) -> None:
            begin = 0
            for part in parts:
                end = begin + _length(part.rows)
                for source, target in zip(self._source(part), into, strict=True):
                    _copy(source, part.rows, target[begin:end])
                begin = end

        return fill

    def _fill_results(self, rows: Index) -> Fill:
        def fill(into: Sequence[torch.Tensor]) -> None:
            for source, target in zip((self._out, self._lse), into, strict=True):
                target.copy_(source[rows])

        return fill

    def _source(self, part: Part) -> Sequence[torch.Tensor]:
        return self._arrived if part.arrived else self._keys

    def _run(self, call: StepCall) -> None:
        k, v = (self._keys_of(call, tensor) for tensor in range(2))
        window_left = self._exchange.mask.window_left if call.causal else None
        tasks = KernelTasks(
            call.cu_seqlens_q, call.cu_seqlens_kv, call.causal, window_left, self._scale
        )
        rows, into = call.queries, None
        if call.first and isinstance(rows, slice) and self._out.dtype == self._dtype:
            into = self._out[rows], self._lse[rows]
        part = self._core.kernel.forward(self._q[rows], k, v, tasks, into)
        if into is None:
            merge_rows(self._out, self._lse, rows, *part)

    def _keys_of(self, call: StepCall, tensor: int) -> torch.Tensor:
        parts = [self._source(part)[tensor][part.rows] for part in call.keys]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows if call.order is None else rows[call.order]


def nothing_to_fill(_: Sequence[torch.Tensor]) -> None:
    """Fills the rows of a kind that has none."""


def _words(layout: KindLayout, messages: torch.Tensor) -> torch.Tensor:
    return messages.new_empty((layout.rows, layout.format.words))


def _received(layout: KindLayout, messages: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the rows of each tensor of a kind, where they arrived if there are none of another
    kind."""
    if layout.place is None:
        return layout.format.tensors(layout.in_place(messages))
    words = _words(layout, messages)
    layout.take(messages, words)
    return layout.format.tensors(words)


def _length(rows: Index) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else rows.shape[0]


def _copy(source: torch.Tensor, rows: Index, into: torch.Tensor) -> None:
    if isinstance(rows, slice):
        into.copy_(source[rows])
    else:
        torch.index_select(source, 0, rows, out=into)
