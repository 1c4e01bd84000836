"""Random valid plans, and dense references to hold them against."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from distca.attention.reference import attend, document_visibility
from distca.plan import Mask, Plan, Tasks, place_sequentially
from distca.plan.span import Int64s


def random_lengths(rng: np.random.Generator, tokens: int) -> Int64s:
    """Document lengths that fill `tokens`: one-token documents, odd ones and long ones."""
    lengths = []
    left = tokens
    while left:
        choice = rng.integers(4)
        length = 1 if choice == 0 else int(rng.integers(1, left + 1 if choice == 1 else 200))
        lengths.append(min(length, left))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def random_plan(
    rng: np.random.Generator,
    lengths: Int64s,
    world_size: int,
    tokens_per_rank: int,
    mask: Mask,
    block: int = 32,
) -> Plan:
    """A plan whose placed pieces are cut at random, in queries and keys, onto random servers."""
    placement = place_sequentially([lengths], world_size, tokens_per_rank)
    rows = []
    for document, start, end in zip(
        placement.document, placement.start, placement.end, strict=True
    ):
        inside = [x for x in range(start, end) if x % block == 0 and x > start]
        cuts = sorted(rng.choice(inside, size=rng.integers(len(inside) + 1), replace=False))
        size = mask.attention_chunk or int(end)
        chunks = [x for x in range(start + 1, end) if x % size == 0]
        edges = sorted({int(start), *(int(c) for c in cuts), *chunks, int(end)})
        for q_start, q_end in itertools.pairwise(edges):
            first = int(mask.first_key(q_start))
            # A windowed task is cut in its keys only where a full rectangle would remain.
            full_from = int(mask.first_key(q_end - 1))
            points = [
                x
                for x in range(full_from, q_start + 1)
                if x % block == 0 and (x == first or first == full_from) and x > first
            ]
            kv_cuts = (
                sorted(
                    rng.choice(points, size=rng.integers(min(len(points), 3) + 1), replace=False)
                )
                if points
                else []
            )
            kv_edges = [first, *(int(c) for c in kv_cuts), q_end]
            for kv_start, kv_end in itertools.pairwise(kv_edges):
                server = int(rng.integers(world_size))
                rows.append((int(document), q_start, q_end, kv_start, kv_end, server))
    return Plan(lengths, placement, Tasks.from_rows(rows), mask, block)


def dense_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    lengths: Int64s,
    mask: Mask,
    softmax_scale: float,
) -> torch.Tensor:
    """Masked softmax attention over all tokens at once; differentiable, in the inputs' dtype."""
    visible = document_visibility(lengths.tolist(), mask.window_left, mask.attention_chunk)
    return attend(q_THD, k_THD, v_THD, visible, softmax_scale)[0]
