"""One call of core attention: all head groups' steps, and autograd's record of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from distca.runtime.core_attention import ExchangeSlot
    from distca.runtime.group_call import GroupCall


class Call:
    """One call of core attention, as the steps that other work can be done between.

    Every rank does the same steps in the same order: `start`, `compute`, `finish`; and for the
    gradients `start_backward`, `compute_backward`, `finish_backward`. Exchanges that a step starts
    are waited for by the next; those of `send_ahead`, too.

    With several head groups each step does theirs one after the other: the first group's kernels
    run while the others' rows are under way, and its outputs return while the others' kernels run.
    So what a dispatch takes longer than the other nano-batch's linear layers is hidden, too.

    Args:
        groups: the calls of the head groups.
        slot: of the nano-batch.

    Attributes:
        late: see `ExchangeSlot`.
        before: the slot's call whose backward pass comes after this one's; None: there is none, or
            it sends nothing ahead.
    """

    def __init__(self, groups: Sequence[GroupCall], slot: ExchangeSlot) -> None:
        self._groups, self._slot = groups, slot
        self.late = slot.late
        self.before: Call | None = None

    def _of_groups(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of each group's heads of `[rows, heads, ...]`."""
        return tensor.chunk(len(self._groups), dim=1)

    def start(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sends the local rows to their servers."""
        for group, *inputs in zip(self._groups, *map(self._of_groups, (q, k, v)), strict=True):
            group.start(*inputs)

    def compute(self) -> None:
        """Runs the kernels, and sends outputs to their owners."""
        for group in self._groups:
            group.compute()

    def finish(self) -> torch.Tensor:
        """The final output of the local rows."""
        if len(self._groups) == 1:
            return self._groups[0].finish()
        out = torch.cat([group.finish() for group in self._groups], dim=1)
        # The model keeps it, so the groups need none of their own.
        for group, part in zip(self._groups, self._of_groups(out.detach()), strict=True):
            group.keep_output(part)
        return out

    def start_backward(self, dout: torch.Tensor) -> None:
        """Sends the output's gradient, and what the kernels need again, to the servers."""
        for group, part in zip(self._groups, self._of_groups(dout), strict=True):
            group.start_backward(part)

    def start_backward_without_tokens(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """The same on a rank that only serves; `q` and `k` have no rows."""
        for group, *inputs in zip(self._groups, *map(self._of_groups, (q, k)), strict=True):
            group.start_backward_without_tokens(*inputs)

    def compute_backward(self) -> None:
        """Runs the kernels, and sends gradients to their owners."""
        for group in self._groups:
            group.compute_backward()
        if self._slot.last is self:
            # Its keys and values have come, so there is room for those of the layer before.
            self._slot.last = before = self.before
            self.before = None
            if before is not None:
                before.send_ahead()

    def send_ahead(self) -> None:
        """Sends what the backward pass needs and is known before its turn."""
        for group in self._groups:
            group.send_ahead()

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """The gradients of the local queries, keys and values."""
        if len(self._groups) == 1:
            return self._groups[0].finish_backward()
        gradients = zip(*(group.finish_backward() for group in self._groups), strict=True)
        return tuple(torch.cat(parts, dim=1) for parts in gradients)


def differentiable_call(
    call: Call,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    pause: Callable[[], None] | None,
) -> torch.Tensor:
    """Does a call's steps, and lets autograd do those for the gradients.

    The arguments and what is returned are those of `CoreAttention.__call__`.
    """
    ticket = _Start.apply(  # type: ignore[no-untyped-call]
        q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous(), call
    )
    if pause is not None:
        pause()
        if call.late:
            pause()
    ticket = _Compute.apply(ticket, call)  # type: ignore[no-untyped-call]
    if pause is not None and not call.late:
        pause()
    return _Finish.apply(ticket, call)  # type: ignore[no-any-return,no-untyped-call]


class _Start(torch.autograd.Function):
    """The first of three nodes; what they hand on to each other is in the `Call`.

    The tickets between them are empty tensors, by which autograd knows the order.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        ctx.call = call
        call.start(q.detach(), k.detach(), v.detach())
        return q.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        return *ctx.call.finish_backward(), None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, call: Call) -> torch.Tensor:  # type: ignore[override]
        ctx.call = call
        call.compute()
        return ticket.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.call.compute_backward()
        return ticket, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, call: Call) -> torch.Tensor:  # type: ignore[override]
        ctx.call = call
        return call.finish()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.call.start_backward(dout.contiguous())
        return dout.new_empty(0), None
