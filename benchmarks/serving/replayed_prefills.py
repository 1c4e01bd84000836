"""A layer of prefills on ranks that one process plays in turn; all their bytes are copied."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.virtual_ranks import CPU, core_attention_of_ranks
from distca.cost.steps import STEP_SLOTS, step_memory, stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Placement, SteppedPlan
from distca.plan.span import Floats
from distca.runtime.messages import QAndKV
from distca.runtime.serving.step_exchange import build_stepped_exchange
from distca.runtime.serving.stepped_call import SteppedCall
from distca.schedule.serving.steps import step_program


@dataclass(frozen=True)
class Replayed:
    """Figures of a layer.

    Attributes:
        seconds: CPU seconds of each rank, float64 `[ranks]`.
        bytes_sent: bytes between ranks, which are those of the plan.
        total: sum of all outputs, the same for all plans of the same chunks.
    """

    seconds: Floats
    bytes_sent: int
    total: float


class ReplayedLayer:
    """A layer of a model with random weights, in float32.

    Args:
        shape: attention heads.
        ffn_hidden_size: width of the gated MLP.
    """

    def __init__(self, shape: AttentionShape, ffn_hidden_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden = self._hidden = shape.heads * shape.head_dim
        of_keys = 2 * shape.kv_heads * shape.head_dim
        self._shape = shape
        self._before, self._output, self._up, self._down = (
            torch.randn(*size, generator=generator) / size[0] ** 0.5
            for size in (
                (hidden, hidden + of_keys),
                (hidden, hidden),
                (hidden, 2 * ffn_hidden_size),
                (ffn_hidden_size, hidden),
            )
        )

    def linear_seconds(self, tokens: int) -> float:
        """Returns the CPU seconds of the layer's products for a number of tokens."""
        x = torch.ones(tokens, self._hidden)
        begin = time.thread_time()
        x @ self._before
        gate, up = ((x @ self._output) @ self._up).chunk(2, dim=1)
        (torch.nn.functional.silu(gate) * up) @ self._down
        return time.thread_time() - begin

    def run(self, stepped: SteppedPlan) -> Replayed:
        """Runs all ranks: their products, and core attention by the plan."""
        # Transports refer to each other, so only the collector frees the buffers of an earlier run.
        gc.collect()
        plan, shape = stepped.plan, self._shape
        ranks = plan.world_size
        tokens = plan.own_tokens_per_rank().tolist()
        seconds = np.array([self.linear_seconds(each) if each else 0.0 for each in tokens])
        needed = step_memory(stepped, shape)
        cores = core_attention_of_ranks(ranks, STEP_SLOTS, needed, CPU)
        rows = [_rows_of(length, shape, n) for n, length in enumerate(plan.lengths.tolist())]
        calls = []
        for rank, core in enumerate(cores):
            of_rank = plan.placement.rank == rank
            own = plan.placement.select(of_rank & plan.own_pieces)
            held = plan.placement.select(of_rank)
            q, (k, v) = _taken(own, rows, 0), (_taken(held, rows, kind) for kind in (1, 2))
            exchange = build_stepped_exchange(stepped, rank)
            tensors = QAndKV([q], [k, v])
            calls.append(SteppedCall(core, exchange, tensors, shape.head_dim**-0.5))
        for event in step_program(stepped.steps):
            for rank, call in enumerate(calls):
                begin = time.thread_time()
                call.do(event)
                seconds[rank] += time.thread_time() - begin
        sent = sum(sum(each.transport.bytes_sent.values()) for each in cores)
        assert sent == stepped_bytes(stepped, shape).total, "bytes are not the plan's"
        total = sum(float(call.outputs()[0].double().sum()) for call in calls)
        return Replayed(seconds, sent, total)


def _rows_of(length: int, shape: AttentionShape, document: int) -> list[torch.Tensor]:
    """Queries, keys and values of a document, `[tokens, heads, head_dim]` each."""
    generator = torch.Generator().manual_seed(document)
    heads = shape.heads, shape.kv_heads, shape.kv_heads
    return [torch.randn(length, each, shape.head_dim, generator=generator) for each in heads]


def _taken(
    pieces: Placement, of_documents: Sequence[Sequence[torch.Tensor]], kind: int
) -> torch.Tensor:
    """The rows of pieces, in their order, of the queries (0), keys (1) or values (2)."""
    columns = (column.tolist() for column in (pieces.document, pieces.start, pieces.end))
    parts = [of_documents[n][kind][start:end] for n, start, end in zip(*columns, strict=True)]
    return torch.cat([of_documents[0][kind][:0], *parts])
