"""Core attention of a plan that drops rows: which of them stay is chosen by importance.

Of each span that a rank sends, and of each span of its own queries, those rows stay that were most
important in the layer before; how many, the plan says. So nothing but these rows is exchanged, and
there are as many bytes and pairs as planned, whatever the tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.attention.importance import most_important
from distca.attention.kernel import KernelTasks
from distca.attention.merge import merge_rows
from distca.attention.sink import with_sink
from distca.runtime.core_attention import CoreAttention
from distca.runtime.messages import QAndKV
from distca.runtime.serving.importance import Importance
from distca.runtime.serving.kept_exchange import KeptCall, KeptExchange, KeptSpan
from distca.runtime.serving.stepped_call import Fill, SteppedCall, nothing_to_fill


class SparseCall(SteppedCall):
    """One call of core attention that drops rows, which a program's events lead through.

    Args:
        core: transport, kernel and buffers.
        exchange: this rank's part of the plan.
        tensors: local queries; keys and values.
        softmax_scale: factor of the scores.
        importance: importance of the local keys, `[local key rows, kv_heads]`.
    """

    def __init__(
        self,
        core: CoreAttention,
        exchange: KeptExchange,
        tensors: QAndKV,
        softmax_scale: float,
        importance: torch.Tensor,
    ) -> None:
        super().__init__(core, exchange.own, tensors, softmax_scale)
        self._kept = exchange
        self._types = (), tuple((each.shape[2:], each.dtype) for each in tensors.kv)
        self._of_keys = importance
        of_queries = importance[exchange.key_of_query]
        of_queries[exchange.always] = float("inf")
        self._of_queries = of_queries
        self._chosen: dict[tuple[bool, KeptSpan], tuple[torch.Tensor, ...]] = {}

    def chosen_keys(self, span: KeptSpan) -> tuple[torch.Tensor, ...]:
        """Returns the local key rows that stay of a span, those of each head."""
        return self._choose(span, True)

    def chosen_queries(self, span: KeptSpan) -> tuple[torch.Tensor, ...]:
        """Returns the local queries that stay of a span, those of each head."""
        return self._choose(span, False)

    def _choose(self, span: KeptSpan, keys: bool) -> tuple[torch.Tensor, ...]:
        if (keys, span) not in self._chosen:
            table = self._of_keys if keys else self._of_queries
            by_head = most_important(table[span.begin : span.end], span.counts)
            self._chosen[keys, span] = tuple(rows + span.begin for rows in by_head)
        return self._chosen[keys, span]

    def _fills(self, number: int) -> tuple[Fill, Fill]:
        spans = self._kept.steps[number].send

        def fill(into: Sequence[torch.Tensor]) -> None:
            rows, heads = _rows_and_heads([self.chosen_keys(span) for span in spans])
            places = self._kept.key_places[rows]
            for source, target in zip(self._keys, into, strict=True):
                target.copy_(source[places, heads])

        return nothing_to_fill, fill

    def _kernels(self, number: int) -> None:
        super()._kernels(number)
        for call in self._kept.steps[number].calls:
            self._run_kept(call)

    def _run_kept(self, call: KeptCall) -> None:
        kv_heads = len(call.queries[0].counts)
        chosen = [self.chosen_queries(span) for span in call.queries]
        # Queries of a group, and their results, are a row.
        rows, heads = _rows_and_heads(chosen)
        rows = rows * kv_heads + heads
        q, out, lse = (
            each.view(len(each) * kv_heads, -1, *each.shape[2:])
            for each in (self._q, self._out, self._lse)
        )
        k, v = (each[call.keys].unsqueeze(1) for each in self._arrived)
        tasks = KernelTasks(call.cu_seqlens_q, call.cu_seqlens_kv, False, None, self._scale)
        part = self._core.kernel.forward(q[rows], k, v, tasks)
        merge_rows(out, lse, rows, *part)


@dataclass(frozen=True)
class SparseAttention:
    """Core attention of layers that all drop the same rows.

    Attributes:
        core: transport, kernel and buffers.
        exchange: this rank's part of the plan.
        importance: importance of this rank's tokens, which each layer tells for the next one.
    """

    core: CoreAttention
    exchange: KeptExchange
    importance: Importance

    @property
    def queries(self) -> int:
        """Query rows of this rank."""
        return self.exchange.own.queries

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the outputs of this rank's queries. Collective.

        Args:
            q: local queries, `[local rows, heads, head_dim]`.
            k: keys, `[rows, kv_heads, head_dim]`: the local ones at the exchange's places.
            v: like `k`.
            scale: factor of the scores.
            sink: one more logit of each head, `[heads]`, or None.
        """
        table = self.importance.table
        call = SparseCall(self.core, self.exchange, QAndKV([q], [k, v]), scale, table)
        out, lse = call.run(self.importance)
        if sink is not None:
            out, _ = with_sink(out, lse, sink)
        return out.to(q.dtype)


def _rows_and_heads(
    chosen: Sequence[tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of single heads, span by span and head by head: number and head of each."""
    heads = [torch.full_like(rows, head) for span in chosen for head, rows in enumerate(span)]
    return torch.cat([rows for span in chosen for rows in span]), torch.cat(heads)
