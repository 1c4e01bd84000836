"""The kernels of an attention server over its served rows: one call for each task shape."""

from __future__ import annotations

import torch

from distca.attention.kernel import Kernel, KernelTasks
from distca.attention.merge import merge_partial
from distca.runtime.exchange import Exchange, KernelCall
from distca.runtime.workspace import Workspace


def _take(tensor: torch.Tensor, rows: torch.Tensor | None, scratch: Workspace) -> torch.Tensor:
    return tensor if rows is None else scratch.gather(tensor, rows)


def _tasks(call: KernelCall, exchange: Exchange, softmax_scale: float) -> KernelTasks:
    window_left = exchange.mask.window_left if call.causal else None
    return KernelTasks(
        call.cu_seqlens_q, call.cu_seqlens_kv, call.causal, window_left, softmax_scale
    )


def compute_outputs(
    kernel: Kernel,
    exchange: Exchange,
    served: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    softmax_scale: float,
    workspace: Workspace,
    scratch: Workspace,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and LSE of the served query rows; those of rows without a task are undefined.

    Args:
        kernel: attention kernel of this device.
        exchange: this rank's part of the plan.
        served: queries, keys and values.
        softmax_scale: factor of the scores.
        workspace: memory for the result, unless one kernel call gives it as a whole.
        scratch: memory for temporaries.
    """
    q, k, v = served
    out = lse = None
    for call in exchange.calls:
        with scratch.borrowed():
            part_out, part_lse = kernel.forward(
                _take(q, call.q_rows, scratch),
                _take(k, call.kv_rows, scratch),
                _take(v, call.kv_rows, scratch),
                _tasks(call, exchange, softmax_scale),
            )
            if len(exchange.calls) == 1 and call.q_rows is None and call.first_q is None:
                return part_out, part_lse
            if out is None or lse is None:
                out, lse = _room_for_outputs(q, workspace)
            _put_outputs(out, lse, part_out, part_lse, call, scratch)
    return _room_for_outputs(q, workspace) if out is None or lse is None else (out, lse)


def _room_for_outputs(q: torch.Tensor, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
    return workspace.rows(q, len(q)), workspace.take(tuple(q.shape[:2]), torch.float32)


def _put_outputs(
    out: torch.Tensor,
    lse: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    call: KernelCall,
    scratch: Workspace,
) -> None:
    """Puts a kernel call's outputs into the served rows; repeated rows merge by LSE."""
    rows = call.q_rows
    if rows is None:
        rows = torch.arange(len(out), out=scratch.take((len(out),), torch.int64))
    with scratch.borrowed():
        first = _take(rows, call.first_q, scratch)
        out.index_copy_(0, first, _take(part_out, call.first_q, scratch))
        lse.index_copy_(0, first, _take(part_lse, call.first_q, scratch))
    for part in call.repeated_q:
        with scratch.borrowed():
            merge_partial(
                out,
                lse,
                scratch.gather(rows, part),
                scratch.gather(part_out, part),
                scratch.gather(part_lse, part),
                scratch.take,
            )


def compute_gradients(
    kernel: Kernel,
    exchange: Exchange,
    served: tuple[torch.Tensor, ...],
    softmax_scale: float,
    workspace: Workspace,
    scratch: Workspace,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the served rows, float32: `(dq, dk, dv)`.

    `served` are the output's gradient, queries, keys, values, output and LSE; the other arguments
    are those of `compute_outputs`.
    """
    dout, q, k, v, out, lse = served
    dq, dk, dv = (workspace.rows(x, len(x), torch.float32).zero_() for x in (q, k, v))
    for call in exchange.calls:
        with scratch.borrowed():
            parts = kernel.backward(
                _take(dout, call.q_rows, scratch),
                _take(q, call.q_rows, scratch),
                _take(k, call.kv_rows, scratch),
                _take(v, call.kv_rows, scratch),
                _take(out, call.q_rows, scratch),
                _take(lse, call.q_rows, scratch),
                _tasks(call, exchange, softmax_scale),
            )
            for total, part, rows in zip(
                (dq, dk, dv), parts, (call.q_rows, call.kv_rows, call.kv_rows), strict=True
            ):
                if rows is None:
                    total += part
                elif part.dtype == total.dtype:
                    total.index_add_(0, rows, part)
                else:
                    total.index_add_(0, rows, scratch.copy(part, total.dtype))
    return dq, dk, dv
