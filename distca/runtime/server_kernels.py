"""The kernels of an attention server over its served rows, and what is made of their results.

There is one call for each task shape. The results of all calls lie one after the other, and those
that come back from other servers behind them; rows are made of these parts once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.attention.kernel import Gradients, Kernel, KernelTasks, Outputs
from distca.attention.merge import LseMerge, merge_shared, sum_parts
from distca.runtime.exchange import Exchange, KernelCall, Rows
from distca.runtime.messages import PackedRows
from distca.runtime.row_comm import RowWriter, ServedRows
from distca.runtime.workspace import Workspace


def _tasks(call: KernelCall, exchange: Exchange, softmax_scale: float) -> KernelTasks:
    window_left = exchange.mask.window_left if call.causal else None
    return KernelTasks(
        call.cu_seqlens_q, call.cu_seqlens_kv, call.causal, window_left, softmax_scale
    )


def compute_outputs(
    kernel: Kernel,
    exchange: Exchange,
    q: ServedRows,
    kv: ServedRows,
    softmax_scale: float,
    into: PackedRows | None,
    scratch: Workspace,
) -> Outputs | None:
    """Outputs and LSE of all calls' queries, one call after the other.

    Args:
        kernel: attention kernel of this device.
        exchange: this rank's part of the plan.
        q: queries.
        kv: keys and values.
        softmax_scale: factor of the scores.
        into: memory for the result; None: the kernel takes it for the only call.
        scratch: memory for temporaries.
    """
    begin, found = 0, None
    for call in exchange.calls:
        with scratch.borrowed():
            (query,) = q.take(call.q_rows, scratch)
            k, v = kv.take(call.kv_rows, scratch)
            rows = slice(begin, begin + call.queries)
            out = None if into is None else (into.tensors[0][rows], into.tensors[1][rows])
            found = kernel.forward(query, k, v, _tasks(call, exchange, softmax_scale), out)
        begin = rows.stop
    return found


def merge(parts: PackedRows, lse_merge: LseMerge, scratch: Workspace) -> None:
    """Merges partial outputs by LSE, into the rows that follow them."""
    if lse_merge.merges is None:
        return
    out, lse = (each[: lse_merge.with_merged] for each in parts.tensors)

    def gather(rows: torch.Tensor) -> Outputs:
        out, lse = parts.gather(rows, scratch).tensors
        return out, lse

    with scratch.borrowed():
        merge_shared(out, lse, lse_merge.merges, gather, scratch.take)


def received_outputs(exchange: Exchange, parts: PackedRows, scratch: Workspace) -> RowWriter:
    """Writes the outputs and LSE of the received queries."""
    lse_merge, q = exchange.received_outputs, exchange.q

    def write(into: PackedRows, _: slice) -> None:
        if lse_merge is None:
            into.words.copy_(parts.words[q.local : q.served])
            return
        merge(parts, lse_merge, scratch)
        torch.index_select(parts.words, 0, lse_merge.rows, out=into.words)

    return RowWriter(write, at_once=True)


def local_outputs(exchange: Exchange, parts: PackedRows, scratch: Workspace) -> Outputs:
    """Makes the final outputs and LSE of the local queries, in memory of their own.

    Args:
        exchange: this rank's part of the plan.
        parts: outputs and LSE of all calls, then those that came back, then room for merged ones.
        scratch: memory for temporaries.
    """
    lse_merge = exchange.local_outputs
    out, lse = parts.tensors
    if lse_merge is None:
        local = slice(0, exchange.q.local)
        out, lse = (each[local].clone(memory_format=torch.contiguous_format) for each in (out, lse))
        return out, lse
    merge(parts, lse_merge, scratch)
    rows = lse_merge.rows
    return torch.index_select(out, 0, rows), torch.index_select(lse, 0, rows)


def compute_gradients(
    kernel: Kernel,
    exchange: Exchange,
    q: Sequence[ServedRows],
    kv: ServedRows,
    softmax_scale: float,
    into: Gradients,
    scratch: Workspace,
) -> None:
    """Computes the gradients of all calls' rows, one call after the other.

    Args:
        kernel: attention kernel of this device.
        exchange: this rank's part of the plan.
        q: the output's gradient, the output, its LSE and the queries.
        kv: keys and values.
        softmax_scale: factor of the scores.
        into: memory for the gradients of queries, keys and values.
        scratch: memory for temporaries.
    """
    queries = keys = 0
    for call in exchange.calls:
        rows = slice(queries, queries + call.queries)
        kv_rows = slice(keys, keys + call.keys)
        with scratch.borrowed():
            dout, out, lse, query = (x for each in q for x in each.take(call.q_rows, scratch))
            k, v = kv.take(call.kv_rows, scratch)
            gradients = into[0][rows], into[1][kv_rows], into[2][kv_rows]
            tasks = _tasks(call, exchange, softmax_scale)
            kernel.backward(dout, query, k, v, out, lse, tasks, gradients)
        queries, keys = rows.stop, kv_rows.stop


def received_gradients(rows: Rows, parts: Sequence[torch.Tensor]) -> RowWriter:
    """Writes the gradients of the received rows of one kind, of which all calls gave `parts`."""
    sums = rows.received_sums

    def write(into: PackedRows, piece: slice) -> None:
        for gradients, target in zip(parts, into.tensors, strict=True):
            if sums is None:
                target.copy_(gradients[rows.local : rows.served][piece])
            elif sums.begins is None:
                torch.index_select(gradients, 0, sums.parts[piece], out=target)
            else:
                sum_parts(gradients, sums, target)

    return RowWriter(write, at_once=sums is not None and sums.begins is not None)


def local_gradients(rows: Rows, parts: torch.Tensor) -> torch.Tensor:
    """Makes the gradients of the local rows, in memory of their own.

    Args:
        rows: rows of the kind.
        parts: gradients of all calls, then those that came back.
    """
    if rows.computed_alone:
        return parts
    if rows.local_sums is None:
        return parts[: rows.local].clone()
    return sum_parts(parts, rows.local_sums)
