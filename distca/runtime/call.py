"""One call of core attention: the steps of all head groups, and their autograd functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from distca.runtime.group_call import GroupCall
from distca.runtime.latent_rows import SentLatents
from distca.runtime.program_run import ProgramRun
from distca.schedule.program import Event


class Call:
    """One call of core attention, split into steps with room for other work between them.

    Every rank does the same steps in the order of the program: `start`, `compute`, `finish`; and
    for the gradients `start_backward`, `compute_backward`, `finish_backward`. A step starts
    exchanges, and the next one waits for them; `compute_backward` also for those of `send_ahead`.

    With several head groups each step does one group after the other: the first group's kernels
    run while the others' rows are under way, and its outputs return while the others' kernels run.
    That hides the part of a dispatch that outlasts the other nano-batch's linear layers.

    Args:
        group_calls: calls of the head groups.
        run: program that is followed, with the exchanges of the pass that runs.
        nano_batch: number of the call's nano-batch.
        layer: number of the call's layer in the model chunk.
    """

    def __init__(
        self, group_calls: Sequence[GroupCall], run: ProgramRun, nano_batch: int, layer: int
    ) -> None:
        self._group_calls, self.run, self.nano_batch = group_calls, run, nano_batch
        self._layer = layer

    @property
    def _exchange(self) -> Any:
        return self.run.exchange(self.nano_batch, self._layer)

    def _of_groups(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of each head group's part of a tensor `[rows, heads, ...]`."""
        return tensor.chunk(len(self._group_calls), dim=1)

    def start(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        latents: SentLatents | None = None,
    ) -> None:
        """Sends the local rows to their servers.

        Args:
            q: queries, `[local rows, heads, head_dim]`.
            k: keys, `[local key rows, kv_heads, head_dim]`.
            v: values, `[local key rows, kv_heads, v_head_dim]`.
            latents: latents that travel instead of keys and values, of all heads in one group;
                None: none do.
        """
        for group, *inputs in zip(self._group_calls, *map(self._of_groups, (q, k, v)), strict=True):
            group.start(self._exchange, *inputs, latents)

    def compute(self) -> None:
        """Runs the kernels, and sends outputs to their owners."""
        for group in self._group_calls:
            group.compute()

    def finish(self, sink: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the final output of the local rows, `[local rows, heads, v_head_dim]`.

        Args:
            sink: one more logit of each head, `[heads]`; None: there is none.
        """
        if len(self._group_calls) == 1:
            return self._group_calls[0].finish(sink)
        count = len(self._group_calls)
        sinks = [None] * count if sink is None else sink.chunk(count)
        outs = [group.finish(own) for group, own in zip(self._group_calls, sinks, strict=True)]
        out = torch.cat(outs, dim=1)
        # The model keeps `out` anyway, so the groups keep views of it and free their own outputs.
        for group, part in zip(self._group_calls, self._of_groups(out.detach()), strict=True):
            group.keep_output(part)
        return out

    def start_backward(self, dout: torch.Tensor) -> torch.Tensor | None:
        """Sends the output's gradient, and what the kernels need again, to the servers.

        Returns:
            The gradient of the sink, if there is one.
        """
        sinks = [
            group.start_backward(self._exchange, part)
            for group, part in zip(self._group_calls, self._of_groups(dout), strict=True)
        ]
        found = [each for each in sinks if each is not None]
        return torch.cat(found) if found else None

    def start_backward_without_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        latents: SentLatents | None = None,
    ) -> None:
        """Does `start_backward` on a rank that only serves; the tensors have no rows."""
        for group, *inputs in zip(self._group_calls, *map(self._of_groups, (q, k, v)), strict=True):
            group.start_backward_without_tokens(self._exchange, *inputs, latents)

    def compute_backward(self) -> torch.Tensor | None:
        """Runs the kernels, and sends gradients to their owners.

        Returns:
            The gradient of the weight that expanded latents, if any arrived.
        """
        found = [group.compute_backward() for group in self._group_calls]
        return found[0]

    def send_ahead(self) -> None:
        """Sends the rows that the backward pass needs and that are known before its turn."""
        for group in self._group_calls:
            group.send_ahead(self._exchange)

    def finish_backward(self) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of the local queries, keys and values, and of latents of which any
        were sent."""
        if len(self._group_calls) == 1:
            return self._group_calls[0].finish_backward()
        gradients = zip(*(group.finish_backward() for group in self._group_calls), strict=True)
        return tuple(torch.cat(parts, dim=1) for parts in gradients)


def differentiable_call(
    call: Call,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    event: Event,
    sink_H: torch.Tensor | None = None,
    latents: SentLatents | None = None,
) -> torch.Tensor:
    """Does a call's forward steps, each in its turn; autograd does the backward steps.

    Args:
        call: call of the nano-batch.
        q_THD: local queries, `[local rows, heads, head_dim]`.
        k_THD: local keys, `[local key rows, kv_heads, head_dim]`.
        v_THD: local values, `[local key rows, kv_heads, v_head_dim]`; so wide are outputs' heads.
        event: event whose turn has come: the call's start.
        sink_H: one more logit of each head, `[heads]`; None: there is none.
        latents: latents that travel instead of keys and values; None: none do.
    """
    latent = weight = None
    if latents is not None:
        latent, weight = latents.latent.contiguous(), latents.weight
        # Its gradient is that of `_Compute`.
        latents = replace(latents, weight=None if weight is None else weight.detach())
    ticket = _Start.apply(  # type: ignore[no-untyped-call]
        q_THD.contiguous(), k_THD.contiguous(), v_THD.contiguous(), latent, latents, call
    )
    if ticket.requires_grad:
        call.run.goes_back(event, call)
    call.run.take_turn("forward", "compute", call.nano_batch)
    ticket = _Compute.apply(ticket, weight, call)  # type: ignore[no-untyped-call]
    call.run.take_turn("forward", "finish", call.nano_batch)
    return _Finish.apply(ticket, sink_H, call)  # type: ignore[no-any-return,no-untyped-call]


class _Start(torch.autograd.Function):
    """The first of three autograd functions, which share their state in the `Call`.

    Empty tensors, the tickets, lead from one to the next and so tell autograd the order.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        latent: torch.Tensor | None,
        latents: SentLatents | None,
        call: Call,
    ) -> torch.Tensor:
        ctx.call = call
        if latents is not None and latent is not None:
            latents = replace(latents, latent=latent.detach())
        call.start(q.detach(), k.detach(), v.detach(), latents)
        return q.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:  # type: ignore[override]
        call: Call = ctx.call
        call.run.has_gone_back(call.run.take_turn("backward", "finish", call.nano_batch))
        dq, dk, dv, *of_latent = call.finish_backward()
        return dq, dk, dv, of_latent[0] if of_latent else None, None, None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, ticket: torch.Tensor, weight: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        ctx.call = call
        call.compute()
        return ticket.new_empty(0)

    @staticmethod
    def backward(ctx: Any, ticket: torch.Tensor) -> Any:  # type: ignore[override]
        call: Call = ctx.call
        call.run.take_turn("backward", "compute", call.nano_batch)
        of_weight = call.compute_backward()
        # This layer's keys and values have come, which frees the channel for the layer below's.
        call.run.send_ahead()
        return ticket, of_weight, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, ticket: torch.Tensor, sink: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        ctx.call = call
        return call.finish(None if sink is None else sink.detach())

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:  # type: ignore[override]
        call: Call = ctx.call
        call.run.take_turn("backward", "start", call.nano_batch)
        sink = call.start_backward(dout.contiguous())
        return dout.new_empty(0), sink, None
