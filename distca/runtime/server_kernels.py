"""The kernels of an attention server over its served rows, and what is made of their results.

There is one call for each task shape. The results of all calls lie one after the other, and those
that come back from other servers behind them; rows are made of these parts once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.attention.kernel import Gradients, Kernel, KernelTasks, Outputs
from distca.runtime.exchange import Exchange, KernelCall, Rows
from distca.runtime.messages import PackedRows
from distca.runtime.row_kernels import RowKernels, ServedRows
from distca.runtime.row_sources import MergedRows, SummedRows
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
    row_kernels: RowKernels,
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
        row_kernels: what takes the calls' rows.
        scratch: memory for temporaries.
    """
    begin, found = 0, None
    for call in exchange.calls:
        with scratch.borrowed():
            query, k, v = row_kernels.take([(q, call.q_rows), (kv, call.kv_rows)], scratch)
            rows = slice(begin, begin + call.queries)
            out = None if into is None else (into.tensors[0][rows], into.tensors[1][rows])
            found = kernel.forward(query, k, v, _tasks(call, exchange, softmax_scale), out)
        begin = rows.stop
    return found


def received_outputs(exchange: Exchange, parts: PackedRows) -> MergedRows:
    """The outputs and LSE of the received queries.

    Args:
        exchange: this rank's part of the plan.
        parts: outputs and LSE of all calls, with room for merged ones.
    """
    received = slice(exchange.q.local, exchange.q.served)
    return MergedRows(parts, exchange.received_outputs, received)


def local_outputs(exchange: Exchange, parts: PackedRows) -> MergedRows:
    """The final outputs and LSE of the local queries.

    Args:
        exchange: this rank's part of the plan.
        parts: outputs and LSE of all calls, then those that came back, then room for merged ones.
    """
    return MergedRows(parts, exchange.local_outputs, slice(0, exchange.q.local))


def compute_gradients(
    kernel: Kernel,
    exchange: Exchange,
    q: Sequence[ServedRows],
    kv: ServedRows,
    softmax_scale: float,
    into: Gradients,
    row_kernels: RowKernels,
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
        row_kernels: what takes the calls' rows.
        scratch: memory for temporaries.
    """
    queries = keys = 0
    for call in exchange.calls:
        rows = slice(queries, queries + call.queries)
        kv_rows = slice(keys, keys + call.keys)
        with scratch.borrowed():
            taken = [*((each, call.q_rows) for each in q), (kv, call.kv_rows)]
            dout, out, lse, query, k, v = row_kernels.take(taken, scratch)
            gradients = into[0][rows], into[1][kv_rows], into[2][kv_rows]
            tasks = _tasks(call, exchange, softmax_scale)
            kernel.backward(dout, query, k, v, out, lse, tasks, gradients)
        queries, keys = rows.stop, kv_rows.stop


def received_gradients(rows: Rows, parts: Sequence[torch.Tensor]) -> SummedRows:
    """The gradients of the received rows of one kind: the sum of all calls' `parts`."""
    if rows.received_sums is None:
        return SummedRows([each[rows.local : rows.served] for each in parts])
    return SummedRows(parts, rows.received_sums)


def local_gradients(rows: Rows, parts: torch.Tensor) -> SummedRows:
    """The gradients of the local rows, which have other parts than those of the one kernel call.

    Args:
        rows: rows of the kind.
        parts: gradients of all calls, then those that came back.
    """
    if rows.local_sums is None:
        return SummedRows([parts[: rows.local]])
    return SummedRows([parts], rows.local_sums)
