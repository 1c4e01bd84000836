"""Disaggregated core attention as one differentiable operation.

Forward: dispatch queries, keys and values to the servers; one fused kernel call per task shape;
return outputs and LSE to the owners; merge. Backward: the same road the other way. A partial
task's backward is exact because it is given the *final* output and LSE of its rows.

Exchanges are started by one step and waited for by the next (`Call`), so that other work can be
done in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distca.attention.kernel import Kernel
from distca.cost.memory import CoreAttentionMemory
from distca.runtime.buffers import Buffers
from distca.runtime.call import Call, differentiable_call
from distca.runtime.exchange import Backward, Exchange
from distca.runtime.group_call import GroupCall
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
