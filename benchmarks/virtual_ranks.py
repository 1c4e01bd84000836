"""Ranks of core attention that one process plays in turn; all their bytes are really copied."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from distca.attention import select_kernel
from distca.cost.memory import CoreAttentionMemory, plan_memory
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Plan
from distca.plan.span import Floats, Int64s, expand_ranges
from distca.runtime import (
    AttentionCall,
    Buffers,
    CoreAttention,
    EventCursor,
    build_exchange,
)
from distca.runtime.attention_call import CallResources
from distca.transport.virtual import VirtualTransport

CPU = torch.device("cpu")


def core_attention_of_ranks(
    ranks: int,
    nano_batches: int,
    needed: CoreAttentionMemory,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
) -> list[CoreAttention]:
    """Makes the core attention of every rank, each with a transport and buffers of its own.

    Args:
        ranks: number of ranks.
        nano_batches: number of nano-batches that each rank runs.
        needed: sizes of a rank's buffers.
        device: device that plays all ranks.
        stream: stream of the copies, beside the kernels; None: they run in turn.
    """
    others: list[VirtualTransport] = []
    found = []
    for rank in range(ranks):
        transport = VirtualTransport(rank, others, ranks, device, stream)
        buffers = Buffers(device, nano_batches)
        attention = CoreAttention(transport, select_kernel(device.type), buffers)
        attention.reserve(needed)
        found.append(attention)
    return found


@dataclass(frozen=True)
class Part:
    """Documents that run together: a nano-batch, a round, or a whole micro-batch.

    Attributes:
        plan: their plan.
        starts: first token of each document in the stream of all tokens, int64 `[documents]`.
        groups: first rank of each rank's group, whose ranks alone wait for each other before the
            part, int64 `[ranks]`; None: all ranks do.
    """

    plan: Plan
    starts: Int64s
    groups: Int64s | None = None

    def tokens(self, rank: int, own: bool) -> torch.Tensor:
        """Returns the numbers in the stream of the tokens of a rank's rows, int64.

        Args:
            rank: number of the rank.
            own: whether the rows are those of queries; cached prefixes have none.
        """
        placement = self.plan.placement
        held = placement.rank == rank
        pieces = placement.select(held & self.plan.own_pieces if own else held)
        starts = self.starts[pieces.document] + pieces.start
        return torch.from_numpy(expand_ranges(starts, pieces.end - pieces.start))


@dataclass(frozen=True)
class Replayed:
    """Figures of a layer's core attention, forward and backward.

    Attributes:
        seconds: CPU seconds of each rank in each part, float64 `[parts, ranks]`.
        bytes_sent: bytes that each rank sends to others, int64 `[ranks]`.
        total: sum of all outputs and gradients, the same for all plans of the same documents.
    """

    seconds: Floats
    bytes_sent: Int64s
    total: float

    def fastest(self, other: Replayed) -> Replayed:
        """Returns the figures of two runs of the same plans, with the lesser seconds."""
        return replace(self, seconds=np.minimum(self.seconds, other.seconds))


@dataclass(frozen=True)
class Rows:
    """Inputs of core attention for all tokens of a stream.

    Attributes:
        q: queries, `[tokens, heads, head_dim]`.
        k: keys, `[tokens, kv_heads, head_dim]`.
        v: values, `[tokens, kv_heads, head_dim]`.
        dout: gradients of the outputs, `[tokens, heads, head_dim]`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @staticmethod
    def random(tokens: int, shape: AttentionShape) -> Rows:
        """Draws float32 rows, the same ones each time."""
        generator = torch.Generator().manual_seed(0)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        return Rows(*(torch.randn(tokens, n, shape.head_dim, generator=generator) for n in heads))


def replay(parts: Sequence[Part], shape: AttentionShape, rows: Rows) -> Replayed:
    """Runs the kernels and copies of all ranks one after the other on a CPU.

    Args:
        parts: parts of a micro-batch, which run in turn.
        shape: attention heads, in float32.
        rows: inputs.
    """
    # Transports refer to each other, so only the collector frees the buffers of an earlier replay.
    gc.collect()
    ranks = parts[0].plan.world_size
    needed = CoreAttentionMemory()
    for part in parts:
        needed = needed.union(plan_memory(part.plan, shape))
    attention = core_attention_of_ranks(ranks, 1, needed, CPU)
    found = [_run(part, attention, rows) for part in parts]
    sent = np.array([sum(each.transport.bytes_sent.values()) for each in attention])
    planned = sum(plan_bytes(part.plan, shape).total for part in parts)
    assert sent.sum() == planned, (sent.sum(), planned)
    return Replayed(
        np.array([seconds for seconds, _ in found]), sent, sum(total for _, total in found)
    )


def _run(part: Part, attention: Sequence[CoreAttention], rows: Rows) -> tuple[Floats, float]:
    """Runs a part forward and backward; returns each rank's CPU seconds, and the results' sum."""
    calls, inputs, gradients = [], [], []
    for rank, own in enumerate(attention):
        buffers = own.buffers
        resources = CallResources(
            own.transport,
            own.kernel,
            own.trace,
            own.times,
            buffers.workspaces[0],
            buffers.scratch,
            buffers.rows,
            keeps_inputs=False,
        )
        cursor = EventCursor(buffers.place([build_exchange(part.plan, rank)]))
        calls.append(AttentionCall(resources, cursor, 0, 0, rows.q.shape[-1] ** -0.5, {}))
        queries, keys = part.tokens(rank, own=True), part.tokens(rank, own=False)
        inputs.append((rows.q[queries], rows.k[keys], rows.v[keys]))
        gradients.append(rows.dout[queries])
    steps: list[Callable[[int], Any]] = [
        lambda rank: calls[rank].dispatch(*inputs[rank]),
        lambda rank: calls[rank].compute(),
        lambda rank: calls[rank].combine(),
        lambda rank: calls[rank].dispatch_backward(gradients[rank]),
        lambda rank: calls[rank].compute_backward(),
        lambda rank: calls[rank].combine_backward(),
    ]
    seconds, total = np.zeros(len(calls)), 0.0
    for step in steps:
        for rank in range(len(calls)):
            start = time.thread_time()
            result = step(rank)
            seconds[rank] += time.thread_time() - start
            if step in (steps[2], steps[-1]):
                tensors = result if isinstance(result, tuple) else (result,)
                total += sum(float(each.double().sum()) for each in tensors)
    return seconds, total
