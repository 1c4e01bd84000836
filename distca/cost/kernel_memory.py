"""Memory that the attention kernel allocates itself in the backward pass, beside core attention's
buffers.

These are the bytes of torch's FlashAttention 2 (`mha_varlen_bwd`), for each call: the gradients,
which are copied to core attention's buffers and which packages write there themselves; float32 sums
of the query gradients, and with grouped queries the gradients of keys and values for each query
head, which are added up afterwards. Versions 3 and 4 take as much for queries with heads of 64
elements or more, and float32 sums for each key-value head: no more than version 2.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.cost.memory import FLOAT32_BYTES
from distca.cost.volume import AttentionShape
from distca.plan import Plan
from distca.plan.span import Int64s

_PADDING = 128
"""Rows of temporaries that each task has beyond its queries: the largest block."""


def _as_the_kernel_has_it(shape: AttentionShape) -> AttentionShape:
    """Returns the shape with heads of one size, to which keys or values are filled up with
    zeros."""
    return replace(shape, head_dim=max(shape.head_dim, shape.value_dim), v_head_dim=None)


def _filled_row_bytes(shape: AttentionShape) -> tuple[int, int]:
    """Returns the bytes of the copies that are filled up, for a query row and for a key and value
    row."""
    of_kernel = _as_the_kernel_has_it(shape)
    of_query = of_key = 0
    if shape.value_dim < of_kernel.head_dim:
        # The output, its gradient; the value.
        of_query, of_key = 2 * of_kernel.out_row_bytes, of_kernel.v_row_bytes
    elif shape.head_dim < of_kernel.head_dim:
        of_query, of_key = of_kernel.q_row_bytes, of_kernel.k_row_bytes
    return of_query, of_key


def result_row_bytes(shape: AttentionShape) -> tuple[int, int]:
    """Returns the bytes of the gradients of a query, and of a key and value, as the kernel returns
    them."""
    of_kernel = _as_the_kernel_has_it(shape)
    return of_kernel.q_row_bytes, of_kernel.kv_row_bytes


def temporary_row_bytes(shape: AttentionShape) -> tuple[int, int]:
    """Returns the bytes of temporaries for a query row, and for a key and value row."""
    filled_q, filled_kv = _filled_row_bytes(shape)
    shape = _as_the_kernel_has_it(shape)
    step = 32 if shape.head_dim <= 128 else 64
    head_dim = -(-shape.head_dim // step) * step
    # Beside the sums, the LSE by heads, and of each row and head how much its own output takes up.
    of_query = shape.heads * head_dim * FLOAT32_BYTES + 2 * shape.lse_row_bytes
    grouped = shape.heads > shape.kv_heads
    return of_query + filled_q, filled_kv + (2 * shape.q_row_bytes if grouped else 0)


def kernel_memory(plan: Plan, shape: AttentionShape) -> Int64s:
    """Returns the most bytes that each server's kernels allocate in the backward pass of a layer,
    `[servers]`.

    The results of a call stay until the next one has its own; temporaries end with their call.

    Args:
        plan: a valid plan.
        shape: the heads of one tensor-parallel rank.
    """
    (q_result, kv_result), (q_more, kv_more) = result_row_bytes(shape), temporary_row_bytes(shape)
    results = np.zeros(plan.world_size, dtype=np.int64)
    temporaries = results.copy()
    for causal in (False, True):
        tasks = plan.tasks[plan.tasks.ends_on_diagonal == causal]
        q_rows, kv_rows = np.zeros_like(results), np.zeros_like(results)
        np.add.at(q_rows, tasks.server, tasks.q_end - tasks.q_start)
        np.add.at(kv_rows, tasks.server, tasks.kv_end - tasks.kv_start)
        padding = _PADDING * np.bincount(tasks.server, minlength=plan.world_size)
        results += q_rows * q_result + kv_rows * kv_result
        temporaries = np.maximum(temporaries, (q_rows + padding) * q_more + kv_rows * kv_more)
    return results + temporaries


def kernel_token_bytes(shape: AttentionShape, context_parallel: int = 1) -> int:
    """Returns the bytes of `kernel_memory` for each token of one call, without the padding of its
    documents.

    Args:
        shape: the heads of one tensor-parallel rank.
        context_parallel: ranks that share documents; each has the keys of all.
    """
    q, kv = (
        result + more
        for result, more in zip(result_row_bytes(shape), temporary_row_bytes(shape), strict=True)
    )
    return q + context_parallel * kv
