"""The kernels of an attention server over its served rows: one call for each task shape."""

from __future__ import annotations

import torch

from distca.attention.kernel import Kernel, KernelTasks
from distca.attention.merge import merge_shared
from distca.runtime.exchange import Combination, Exchange, KernelCall
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

    Returns:
        As many rows as are served; where rows come back to this rank, room for them and for merged
        rows follows the local ones (`Exchange.output_rows`).
    """
    q, k, v = served
    parts = []
    for call in exchange.calls:
        with scratch.borrowed():
            parts.append(
                kernel.forward(
                    _take(q, call.q_rows, scratch),
                    _take(k, call.kv_rows, scratch),
                    _take(v, call.kv_rows, scratch),
                    _tasks(call, exchange, softmax_scale),
                )
            )
    if exchange.computed is None and exchange.finished is None:
        return parts[0]
    room = workspace.rows(q, exchange.output_rows)
    room_lse = workspace.take(tuple(room.shape[:2]), torch.float32)
    outputs = room[: q.shape[0]], room_lse[: q.shape[0]]
    if exchange.computed is None:
        for output, part in zip(outputs, parts[0], strict=True):
            output.copy_(part)
    elif parts:
        with scratch.borrowed():
            of_calls = _one_after_the_other(parts, exchange.computed, scratch)
            combine(exchange.computed, of_calls, outputs, scratch)
    return room, room_lse


def _one_after_the_other(
    parts: list[tuple[torch.Tensor, torch.Tensor]], combination: Combination, scratch: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs and LSE of all calls, and room for merged rows."""
    if len(parts) == 1 and combination.merges is None:
        return parts[0]
    (out, lse), *_ = parts
    room = scratch.rows(out, combination.with_merged)
    room_lse = scratch.rows(lse, combination.with_merged)
    torch.cat([part for part, _ in parts], out=room[: combination.parts])
    torch.cat([part for _, part in parts], out=room_lse[: combination.parts])
    return room, room_lse


def combine(
    combination: Combination,
    parts: tuple[torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor],
    scratch: Workspace,
) -> None:
    """Makes rows of partial ones, each of one or of several that merge by LSE.

    Args:
        combination: which of which.
        parts: output and LSE of partial rows, with room for merged ones after them.
        outputs: output and LSE of the rows, which are written.
        scratch: memory for temporaries.
    """
    parts = parts[0][: combination.with_merged], parts[1][: combination.with_merged]
    if combination.merges is not None:
        with scratch.borrowed():
            merge_shared(*parts, combination.merges, scratch.take)
    for part, output in zip(parts, outputs, strict=True):
        torch.index_select(part, 0, combination.rows, out=output)


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
    dq, dk, dv = (workspace.rows(x, x.shape[0], torch.float32).zero_() for x in (q, k, v))
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
