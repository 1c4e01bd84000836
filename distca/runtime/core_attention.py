"""Disaggregated core attention as one differentiable operation.

Forward: dispatch queries, keys and values to the servers; one fused kernel call per task shape;
return outputs and LSE to the owners; merge. Backward: the same road the other way. A partial
task's backward is exact because it is given the *final* output and LSE of its rows.

Exchanges are started by one step and waited for by the next (`Call`), so that other work can be
done in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from distca.attention.kernel import Kernel
from distca.cost.memory import CoreAttentionMemory
from distca.runtime.buffers import Buffers
from distca.runtime.call import Call, differentiable_call
from distca.runtime.exchange import Backward, Exchange, Rows
from distca.runtime.moving_rows import (
    RowsForServers,
    RowsUnderWay,
    add_returned,
    merge_returned,
    send_to_owners,
    send_to_servers,
)
from distca.runtime.serving import compute_gradients, compute_outputs
from distca.runtime.trace import Trace
from distca.transport import Transport


@dataclass
class ExchangeSlot:
    """Where core attention finds this rank's part of the plan that holds when it runs.

    In a pipeline a micro-batch meets other micro-batches on its way back than on its way out: then
    the slot is given the backward tick's exchange before the backward pass starts.

    Attributes:
        exchange: this rank's part of the plan.
        number: of the nano-batch: which buffers its calls use, 0 or 1. Calls of one number follow
            each other, those of two may be under way together.
        ahead: the backward pass sends keys and values before their turn: see `fill_slots`.
        late: it runs its kernels a turn after the other nano-batch: see `fill_slots`.
        last: its call whose backward pass comes next.
    """

    exchange: Exchange
    number: int = 0
    ahead: bool = False
    late: bool = False
    last: Call | None = None

    def send_ahead(self) -> None:
        """Sends what the first layer that goes back needs and is known, if it is sent ahead.

        To be called when the layers have run, before what comes between there and back.
        """
        if self.last is not None:
            self.last.send_ahead()


def fill_slots(
    slots: Sequence[ExchangeSlot], exchanges: Sequence[Exchange], same_ticks: bool
) -> None:
    """Gives nano-batches' slots the exchanges of what runs next.

    Where all queries are computed at home, keys and values travel and their gradients come back,
    and nothing else. Then a nano-batch's outputs are there when its kernels end, and it goes on at
    once: its linear layers run before the other's kernels, so that what travels does so while the
    other's kernels *and* linear layers run. In the backward pass it is the keys and values that are
    there before: they are sent as soon as the kernels of the layer before have run, or by
    `ExchangeSlot.send_ahead`, and their gradients have as long. All ranks must run such a
    micro-batch, there and back.

    Where outputs come back, they would be waited for: then the kernels of both run first.

    Args:
        slots: of a micro-batch's nano-batches, in order.
        exchanges: this rank's part of the plan of each.
        same_ticks: every rank has a micro-batch in every tick, and goes back with the same plans.
    """
    at_home = same_ticks and not any(exchange.q.move for exchange in exchanges)
    for slot, exchange in zip(slots, exchanges, strict=True):
        slot.exchange, slot.ahead = exchange, at_home
    slots[-1].late = at_home and len(slots) > 1


@dataclass(frozen=True)
class CoreAttention:
    """What core attention runs on.

    Attributes:
        transport: between the ranks that share attention servers.
        kernel: the attention kernel of this device.
        backward: "resend": the backward pass sends queries, keys and values again, and nothing is
            kept on the servers in between; "keep": servers keep what they received, which costs
            memory and saves bytes. Only possible where a micro-batch's backward pass has the plan
            of its forward pass.
        trace: records what is done.
        buffers: what calls are run in. Reserve room for a plan before it is run.
    """

    transport: Transport
    kernel: Kernel
    buffers: Buffers
    backward: Backward = "resend"
    trace: Trace = field(default_factory=lambda: Trace(torch.device("cpu")))

    def __post_init__(self) -> None:
        if self.backward not in ("resend", "keep"):
            raise ValueError(f'backward is {self.backward!r}: choose "resend" or "keep"')

    def reserve(self, needed: CoreAttentionMemory) -> None:
        """Makes the buffers hold what plans need; nothing may be under way. Collective.

        Args:
            needed: the same on every rank; see `distca.cost.memory.plan_memory`.
        """
        self.buffers.reserve(needed, self.transport)

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        slot: ExchangeSlot,
        softmax_scale: float,
        labels: Mapping[str, Any] | None = None,
        pause: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Core attention of the local rows, computed by the plan's servers. Collective.

        Args:
            q_THD: `[local rows, heads, head_dim]`.
            k_THD: `[local key rows, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
            v_THD: like `k_THD`.
            slot: this rank's part of the plan, for this pass and for the backward pass.
            softmax_scale: scores are multiplied by it.
            labels: such as the layer, for the trace.
            pause: called while the inputs and then while the outputs are under way: other work can
                be done there. The backward pass pauses at the same places by itself, as autograd
                goes back through what was done in the opposite order.

        Returns:
            `[local rows, heads, head_dim]`.

        Raises:
            ValueError: the tensors do not have the rows that the plan's placement gives this rank.
        """
        exchange = slot.exchange
        for name, tensor, rows in (
            ("q", q_THD, exchange.q),
            ("k", k_THD, exchange.kv),
            ("v", v_THD, exchange.kv),
        ):
            if tensor.shape[0] != rows.local:
                raise ValueError(
                    f"{name} has {tensor.shape[0]} rows, but the plan places {rows.local} "
                    f"tokens on rank {exchange.rank}"
                )
        call = self._call(slot, softmax_scale, labels or {})
        goes_back = torch.is_grad_enabled() and any(x.requires_grad for x in (q_THD, k_THD, v_THD))
        if slot.ahead and goes_back:
            call.before, slot.last = slot.last, call
        return differentiable_call(call, q_THD, k_THD, v_THD, pause)

    def serving_call(
        self, slot: ExchangeSlot, softmax_scale: float, labels: Mapping[str, Any]
    ) -> Call:
        """A call of a rank to which the plan gives no tokens: it only serves. See `Call`."""
        assert slot.exchange.q.local == 0, "a rank with tokens has their queries to send"
        return self._call(slot, softmax_scale, labels)

    def _call(self, slot: ExchangeSlot, softmax_scale: float, labels: Mapping[str, Any]) -> Call:
        count = self.buffers.head_groups
        groups = []
        for group in range(count):
            of_group = {**labels, "head_group": group} if count > 1 else labels
            number = slot.number * count + group
            groups.append(GroupCall(self, slot, number, softmax_scale, of_group))
        return Call(groups, slot)


class GroupCall:
    """The steps of `Call` for one group of heads. A step that starts an exchange does not wait for
    it, the next one does.

    Args:
        attention: what it runs on.
        slot: this rank's part of the plan.
        number: of the group's buffers.
        softmax_scale: scores are multiplied by it.
        labels: for the trace.
    """

    def __init__(
        self,
        attention: CoreAttention,
        slot: ExchangeSlot,
        number: int,
        softmax_scale: float,
        labels: Mapping[str, Any],
    ) -> None:
        self._attention, self._slot, self._number = attention, slot, number
        self._scale, self._labels = softmax_scale, labels
        self._workspace = attention.buffers.slots[number]
        self._scratch = attention.buffers.scratch
        self._exchange = slot.exchange
        # What the next step needs.
        self._sent: RowsUnderWay | None = None
        self._ahead: RowsForServers | None = None
        self._local: tuple[torch.Tensor, ...] = ()
        # What the backward pass needs: queries, keys, values; output and LSE.
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._outputs: tuple[torch.Tensor, ...] = ()

    def _span(self, name: str, lane: str) -> Any:
        return self._attention.trace.span(name, lane, **self._labels)

    @property
    def _keeps(self) -> bool:
        return self._attention.backward == "keep"

    def start(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sends the local rows to their servers."""
        exchange = self._exchange = self._slot.exchange
        with self._span("dispatch", "exchange"):
            sent = self._send("dispatch", [(q, exchange.q), (k, exchange.kv), (v, exchange.kv)])
            self._workspace.clear()
            self._sent = sent.put_together(None if self._keeps else self._workspace)
        if not self._keeps:
            self._inputs = (q, k, v)

    def _send(self, phase: str, tensors: list[tuple[torch.Tensor, Rows]]) -> RowsForServers:
        return send_to_servers(
            self._attention.transport, phase, self._number, tensors, self._scratch
        )

    def _send_to_owners(
        self, phase: str, tensors: list[tuple[torch.Tensor, Rows]], dtype: torch.dtype | None = None
    ) -> None:
        self._sent = send_to_owners(
            self._attention.transport,
            phase,
            self._number,
            tensors,
            self._workspace,
            self._scratch,
            dtype,
        )

    def compute(self) -> None:
        """Runs the kernels, and sends outputs to their owners."""
        assert self._sent is not None
        exchange = self._exchange
        with self._span("wait for dispatch", "exchange"):
            q, k, v = self._sent.wait()
        if self._keeps:
            self._inputs = (q, k, v)
        with self._span("core attention", "kernels"):
            self._local = compute_outputs(
                self._attention.kernel,
                exchange,
                (q, k, v),
                self._scale,
                self._workspace,
                self._scratch,
            )
        with self._span("return", "exchange"):
            self._send_to_owners("return", [(rows, exchange.q) for rows in self._local])

    def finish(self) -> torch.Tensor:
        """The final output of the local rows."""
        assert self._sent is not None
        with self._span("wait for return", "exchange"):
            back = self._sent.wait()
        served = (self._local[0], self._local[1])
        out, lse = merge_returned(self._exchange, served, back, self._workspace, self._scratch)
        self._sent, self._local = None, ()
        # Without its history, the output does not keep itself alive.
        self._outputs = (out.detach(), lse)
        return out

    def keep_output(self, out: torch.Tensor) -> None:
        """Keeps this one for the backward pass: the same numbers as `finish` returned."""
        self._outputs = (out, self._outputs[1])

    def send_ahead(self) -> None:
        """Sends the keys and values again before the gradient is there; queries stay at home."""
        exchange = self._exchange = self._slot.exchange
        assert not exchange.q.move, "only keys and values are known before"
        if not self._keeps:
            _, k, v = self._inputs
            with self._span("dispatch backward", "exchange"):
                self._ahead = self._send("dispatch_backward", [(k, exchange.kv), (v, exchange.kv)])

    def start_backward(self, dout: torch.Tensor) -> None:
        """Sends the output's gradient, and what the kernels need again, to the servers."""
        exchange = self._slot.exchange
        assert exchange is self._exchange or not self._keeps, "kept inputs are of another plan"
        self._exchange = exchange
        travelling = [(rows, exchange.q) for rows in (dout, *self._outputs)]
        if not self._keeps:
            q, k, v = self._inputs
            travelling.append((q, exchange.q))
            if self._ahead is None:
                travelling += [(k, exchange.kv), (v, exchange.kv)]
        with self._span("dispatch backward", "exchange") if self._ahead is None else nullcontext():
            sent = self._send("dispatch_backward", travelling)
            self._workspace.clear()
            self._sent = sent.put_together(self._workspace)
        self._outputs = ()
        if not self._keeps:
            self._inputs = ()

    def start_backward_without_tokens(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """The same on a rank that only serves; `q` and `k` have no rows."""
        self._inputs = (q, k, k)
        self._outputs = (q, q.new_empty(q.shape[:2], dtype=torch.float32))
        self.start_backward(q)

    def compute_backward(self) -> None:
        """Runs the kernels, and sends gradients to their owners."""
        assert self._sent is not None
        exchange = self._exchange
        with self._span("wait for dispatch backward", "exchange"):
            dout, out, lse, *inputs = self._sent.wait()
            if self._ahead is not None:
                inputs += self._ahead.put_together(self._workspace).wait()
                self._ahead = None
        q, k, v = inputs or self._inputs
        with self._span("core attention backward", "kernels"):
            self._local = compute_gradients(
                self._attention.kernel,
                exchange,
                (dout, q, k, v, out, lse),
                self._scale,
                self._workspace,
                self._scratch,
            )
        self._inputs = ()
        with self._span("return backward", "exchange"):
            self._send_to_owners(
                "return_backward",
                list(zip(self._local, (exchange.q, exchange.kv, exchange.kv), strict=True)),
                dout.dtype,
            )

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """The gradients of the local queries, keys and values."""
        assert self._sent is not None
        with self._span("wait for return backward", "exchange"):
            back = self._sent.wait()
        gradients = add_returned(self._exchange, self._local, back, self._scratch)
        self._sent, self._local = None, ()
        return gradients
