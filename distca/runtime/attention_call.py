"""One call of core attention on one rank, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from distca.attention import Kernel
from distca.attention.kernel import Gradients, Outputs
from distca.attention.sink import sink_gradient, with_sink
from distca.runtime.attention_times import AttentionTimes
from distca.runtime.event_cursor import EventCursor
from distca.runtime.exchange import Exchange
from distca.runtime.latent_rows import LatentGradients, SentLatents, expand
from distca.runtime.messages import PackedRows, QAndKV, RowFormat, RowTypes, row_types
from distca.runtime.row_comm import (
    DispatchedRows,
    PendingRows,
    start_combine,
    start_dispatch,
)
from distca.runtime.row_kernels import RecvRows, RowKernels, ServedRows
from distca.runtime.row_sources import NO_ROWS, RowSource, SummedRows, WrittenRows
from distca.runtime.server_kernels import (
    compute_gradients,
    compute_outputs,
    local_gradients,
    local_outputs,
    received_gradients,
    received_outputs,
)
from distca.runtime.trace import Trace
from distca.runtime.workspace import Workspace
from distca.transport import Transport


@dataclass(frozen=True)
class CallResources:
    """The resources that a call of core attention runs on.

    Attributes:
        transport: transport between the ranks that share attention servers.
        kernel: attention kernel of this device.
        trace: timeline of what is done.
        times: times of kernels and waits.
        workspace: memory for what the call keeps between its steps.
        scratch: memory for the temporaries of one step.
        rows: what moves rows on this device, and makes them of their parts.
        keeps_inputs: whether servers keep the kernels' inputs for the backward pass; otherwise
            their owners send them again.
    """

    transport: Transport
    kernel: Kernel
    trace: Trace
    times: AttentionTimes
    workspace: Workspace
    scratch: Workspace
    rows: RowKernels
    keeps_inputs: bool


class AttentionCall:
    """One call of core attention, split into steps with room for other work between them.

    Every rank does the same steps in the order of the program: `dispatch`, `compute`, `combine`;
    and for the gradients `dispatch_backward`, `compute_backward`, `combine_backward`. A step starts
    exchanges, and the next one waits for them; `compute_backward` also for those of `prefetch`.

    Args:
        resources: transport, kernel and memory of the call.
        cursor: program that is followed, with the exchanges of the pass that runs.
        nano_batch: number of the call's nano-batch, which selects channels of the transport.
        layer: number of the call's layer in the model chunk.
        softmax_scale: factor of the scores.
        labels: labels for the trace.
    """

    def __init__(
        self,
        resources: CallResources,
        cursor: EventCursor,
        nano_batch: int,
        layer: int,
        softmax_scale: float,
        labels: Mapping[str, object],
    ) -> None:
        self.cursor, self.nano_batch, self._layer = cursor, nano_batch, layer
        self._resources, self._scale, self._labels = resources, softmax_scale, labels
        self._workspace, self._scratch = resources.workspace, resources.scratch
        # This rank's part of the plan that the present pass has.
        self._exchange: Exchange | None = None
        # Handed from one step to the next.
        self._sent: PendingRows | None = None
        self._served: tuple[ServedRows, ServedRows] | None = None
        self._ahead: DispatchedRows | None = None
        self._parts: PackedRows | Outputs | None = None
        self._gradients: Gradients | None = None
        # Gradients of latents and shared parts of keys that come back.
        self._returned: Sequence[torch.Tensor] = ()
        # Kept for the backward pass: queries, keys, values, of this rank or as it served them;
        # output and LSE.
        self._inputs: tuple[torch.Tensor, ...] = ()
        # Latents and shared parts of keys, if they travel, and the weight that expands them.
        self._travelling: tuple[torch.Tensor, ...] = ()
        self._weight: torch.Tensor | None = None
        self._kept: tuple[ServedRows, ServedRows] | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._sink: torch.Tensor | None = None

    def _exchange_of_pass(self) -> Exchange:
        """Returns this rank's part of the plan in the current pass, which later steps use."""
        exchange = self.cursor.exchange(self.nano_batch, self._layer)
        assert exchange is self._exchange or self._kept is None, "kept inputs are of another plan"
        self._exchange = exchange
        return exchange

    def _span(self, name: str, lane: str) -> AbstractContextManager[None]:
        return self._resources.trace.span(name, lane, **self._labels)

    @contextmanager
    def _wait_span(self, name: str) -> Iterator[None]:
        with self._span(name, "exchange"), self._resources.times.span("waits"):
            yield

    def dispatch(
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
            latents: latents that travel instead of keys and values, or None.
        """
        self._exchange_of_pass()
        self._take_latents(k, latents)
        with self._span("dispatch", "exchange"):
            sent = self._start_dispatch("dispatch", [q], [k, v])
            self._workspace.clear()
            self._sent, self._served = sent.receive(
                None if self._resources.keeps_inputs else self._workspace
            )
        if not self._resources.keeps_inputs:
            self._inputs = (q, k, v)

    def _take_latents(self, k: torch.Tensor, latents: SentLatents | None) -> None:
        if latents is not None:
            self._travelling, self._weight = latents.travelling(k), latents.weight

    def _start_dispatch(
        self, phase: str, of_q: Sequence[torch.Tensor], of_kv: Sequence[torch.Tensor] = ()
    ) -> DispatchedRows:
        """Starts to send rows of tensors of queries, and of keys and values, or their latents."""
        assert self._exchange is not None
        resources = self._resources
        expanded: Sequence[torch.Tensor] = ()
        if of_kv and self._travelling:
            of_kv, expanded = self._travelling, of_kv
        return start_dispatch(
            resources.transport,
            phase,
            self.nano_batch,
            self._exchange,
            QAndKV(of_q, of_kv),
            resources.rows,
            self._scratch,
            expanded,
        )

    def _start_combine(
        self, phase: str, types: RowTypes, sources: Sequence[RowSource], targets: Sequence[RecvRows]
    ) -> None:
        assert self._exchange is not None
        resources = self._resources
        self._sent = start_combine(
            resources.transport,
            phase,
            self.nano_batch,
            self._exchange,
            types,
            sources,
            targets,
            resources.rows,
            self._scratch,
        )

    def compute(self) -> None:
        """Runs the kernels, and sends outputs to their owners."""
        assert self._sent is not None
        assert self._served is not None
        assert self._exchange is not None
        exchange = self._exchange
        with self._wait_span("wait for dispatch"):
            self._sent.wait()
        q, kv = self._served
        self._expand(kv)
        if self._resources.keeps_inputs:
            self._kept = self._served
        query, value = q.local[0], kv.local[1]
        heads = query.shape[1:2]
        types = (heads + value.shape[2:], query.dtype), (heads, torch.float32)
        parts = None
        if not exchange.q.computed_alone:
            parts = PackedRows.take(self._workspace, RowFormat.of(types), exchange.output_rows)
        with self._span("core attention", "kernels"):
            found = compute_outputs(
                self._resources.kernel,
                exchange,
                q,
                kv,
                self._scale,
                parts,
                self._resources.rows,
                self._scratch,
            )
        self._parts = found if parts is None else parts
        with self._span("combine", "exchange"):
            source: RowSource = NO_ROWS
            returned = None
            if parts is not None:
                source = received_outputs(exchange, parts)
                sent = exchange.q.parts + exchange.q.sent
                returned = parts.words[exchange.q.parts : sent]
            self._start_combine("combine", (types, ()), (source, NO_ROWS), (returned, None))
        self._served = None

    def _expand(self, kv: ServedRows) -> None:
        """Makes the keys and values of latents that arrived."""
        if kv.latents is not None:
            assert self._weight is not None, "rows came to a rank without the layer"
            with self._span("expand latents", "kernels"):
                expand(kv, self._weight, self._scratch)

    def combine(self, sink: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the final output of the local rows, `[local rows, heads, v_head_dim]`.

        Args:
            sink: one more logit of each head, `[heads]`, or None.
        """
        assert self._sent is not None
        assert self._parts is not None
        assert self._exchange is not None
        with self._wait_span("wait for combine"):
            self._sent.wait()
        if isinstance(self._parts, PackedRows):
            source = local_outputs(self._exchange, self._parts)
            out, lse = self._resources.rows.merge(source, self._scratch)
        else:
            out, lse = self._parts
        if sink is not None:
            out, lse = with_sink(out, lse, sink)
        self._sent, self._parts, self._sink = None, None, sink
        # Detached, since an output with its autograd history would keep itself alive.
        self._outputs = (out.detach(), lse)
        return out

    @property
    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of the local rows, which `combine` has made, without their history."""
        out, lse = self._outputs
        return out, lse

    def resume(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sink: torch.Tensor | None = None,
    ) -> None:
        """Takes what another call's forward steps had and made, for this one's backward steps.

        Args:
            q, k, v: as `dispatch` takes them.
            out, lse: as `outputs` has them.
            sink: as `combine` takes it.
        """
        assert not self._resources.keeps_inputs, "the servers' inputs are with the other call"
        self._inputs, self._outputs, self._sink = (q, k, v), (out, lse), sink

    def prefetch(self) -> None:
        """Sends keys and values again before the gradient is known. No query may move."""
        assert not self._exchange_of_pass().q.move, "only keys and values are known before"
        if not self._resources.keeps_inputs:
            _, k, v = self._inputs
            with self._span("dispatch backward", "exchange"):
                self._ahead = self._start_dispatch("dispatch_backward", [], [k, v])

    def dispatch_backward(self, dout: torch.Tensor) -> torch.Tensor | None:
        """Sends the output's gradient, and what the kernels need again, to the servers.

        Returns:
            The gradient of the sink, if there is one.
        """
        self._exchange_of_pass()
        of_q, of_kv = [dout, *self._outputs], list[torch.Tensor]()
        if not self._resources.keeps_inputs:
            q, *keys = self._inputs
            of_q.append(q)
            of_kv = keys if self._ahead is None else []
        with self._span("dispatch backward", "exchange") if self._ahead is None else nullcontext():
            sent = self._start_dispatch("dispatch_backward", of_q, of_kv)
            self._workspace.clear()
            self._sent, self._served = sent.receive(self._workspace)
        # Computed while the rows are under way.
        sink = self._sink
        if sink is not None:
            out, lse = self._outputs
            sink = sink_gradient(dout, out, lse, sink)
        self._outputs = ()
        if not self._resources.keeps_inputs:
            self._inputs = ()
        return sink

    def dispatch_backward_without_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        latents: SentLatents | None = None,
    ) -> None:
        """Does `dispatch_backward` on a rank that only serves; the tensors have no rows."""
        self._take_latents(k, latents)
        if not self._resources.keeps_inputs:
            self._inputs = (q, k, v)
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        self._outputs = (out, q.new_empty(q.shape[:2], dtype=torch.float32))
        self.dispatch_backward(out)

    def _of_backward(self) -> tuple[list[ServedRows], ServedRows]:
        """Waits for the inputs of the kernels: those with the queries' rows, then those of keys."""
        assert self._sent is not None
        assert self._served is not None
        self._sent.wait()
        q, kv = self._served
        if self._kept is not None:
            return [q, self._kept[0]], self._kept[1]
        if self._ahead is not None:
            ahead, (_, kv) = self._ahead.receive(self._workspace)
            ahead.wait()
            self._ahead = None
        self._expand(kv)
        return [q], kv

    def compute_backward(self) -> torch.Tensor | None:
        """Runs the kernels, and sends gradients to their owners.

        Returns:
            The gradient of the weight that expanded latents, if any arrived.
        """
        assert self._sent is not None
        assert self._exchange is not None
        exchange = self._exchange
        with self._wait_span("wait for dispatch backward"):
            q, kv = self._of_backward()
        rows, memory = (exchange.q, exchange.kv, exchange.kv), []
        for tensor, of in zip((q[-1].local[-1], *kv.local), rows, strict=True):
            # Gradients of latents come back instead of those of keys and values.
            back = 0 if self._travelling and of is exchange.kv else of.sent
            shape = (of.parts + back, *tensor.shape[1:])
            # What this server computes alone is the result.
            alone = of.computed_alone
            memory.append(
                tensor.new_empty(shape) if alone else self._workspace.take(shape, tensor.dtype)
            )
        dq, dk, dv = self._gradients = memory[0], memory[1], memory[2]
        with self._span("core attention backward", "kernels"):
            compute_gradients(
                self._resources.kernel,
                exchange,
                q,
                kv,
                self._scale,
                self._gradients,
                self._resources.rows,
                self._scratch,
            )
        self._kept = self._served = None
        with self._scratch.borrowed():
            of_latents = self._latent_gradients(kv)
            with self._span("combine backward", "exchange"):
                source: RowSource
                if not self._travelling:
                    types, source = row_types([dk, dv]), received_gradients(exchange.kv, [dk, dv])
                    target: RecvRows = [each[exchange.kv.parts :] for each in (dk, dv)]
                else:
                    types, target = row_types(self._travelling), self._returned
                    source = NO_ROWS if of_latents is None else WrittenRows(of_latents.write)
                self._start_combine(
                    "combine_backward",
                    (row_types([dq]), types),
                    (received_gradients(exchange.q, [dq]), source),
                    ([dq[exchange.q.parts :]], target),
                )
            # Computed while the gradients are under way.
            return None if of_latents is None else of_latents.of_weight()

    def _latent_gradients(self, kv: ServedRows) -> LatentGradients | None:
        """Takes memory for gradients of latents that come back, and makes those that go there."""
        assert self._exchange is not None
        assert self._gradients is not None
        rows = self._exchange.kv
        self._returned = [self._workspace.rows(each, rows.sent) for each in self._travelling]
        if kv.latents is None:
            return None
        assert self._weight is not None
        return LatentGradients(rows, self._gradients[1:], kv.latents, self._weight, self._scratch)

    def combine_backward(self) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of the local queries, keys and values, and of latents if any were
        sent."""
        assert self._sent is not None
        assert self._gradients is not None
        assert self._exchange is not None
        with self._wait_span("wait for combine backward"):
            self._sent.wait()
        of_q, of_kv = self._exchange.q, self._exchange.kv
        pairs = list(zip((of_q, of_kv, of_kv), self._gradients, strict=True))
        # What this server computes alone is the result.
        sources = [local_gradients(*pair) for pair in pairs if not pair[0].computed_alone]
        if (sums := of_kv.returned_sums) is not None:
            sources.append(SummedRows(self._returned, sums))
        made = iter(self._resources.rows.sum(sources))
        gradients = tuple(parts if rows.computed_alone else next(made) for rows, parts in pairs)
        if sums is not None:
            latent, shared = made
            # The gradients of all heads are summed later, so the first head may carry it.
            gradients[1][:, 0, -shared.shape[1] :] += shared
            gradients = *gradients, latent
        self._sent, self._gradients, self._returned = None, None, ()
        return gradients
