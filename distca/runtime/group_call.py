"""What one group of heads does in a call of core attention."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from distca.runtime.exchange import Rows
from distca.runtime.moving_rows import (
    RowsForServers,
    RowsUnderWay,
    add_returned,
    merge_returned,
    send_to_owners,
    send_to_servers,
)
from distca.runtime.serving import compute_gradients, compute_outputs

if TYPE_CHECKING:
    from distca.runtime.core_attention import CoreAttention, ExchangeSlot


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
