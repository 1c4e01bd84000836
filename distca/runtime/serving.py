"""What an attention server does with the rows that it has: one kernel call for each task shape."""

from __future__ import annotations

from typing import Any

import torch

from distca.attention.kernel import Kernel
from distca.attention.merge import merge_partial
from distca.runtime.exchange import Exchange, KernelCall


def _take(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _kernel_options(call: KernelCall, exchange: Exchange, scale: float) -> dict[str, Any]:
    return {
        "causal": call.causal,
        "window_left": exchange.mask.window_left if call.causal else None,
        "softmax_scale": scale,
    }


def compute_outputs(
    kernel: Kernel,
    exchange: Exchange,
    q_served: torch.Tensor,
    k_served: torch.Tensor,
    v_served: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and LSE of the served query rows; those of rows without a task are undefined."""
    out = lse = None
    for call in exchange.calls:
        part_out, part_lse = kernel.forward(
            _take(q_served, call.q_rows),
            _take(k_served, call.kv_rows),
            _take(v_served, call.kv_rows),
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            **_kernel_options(call, exchange, softmax_scale),
        )
        if len(exchange.calls) == 1 and call.q_rows is None and call.first_q is None:
            return part_out, part_lse
        if out is None or lse is None:
            out = torch.empty_like(q_served)
            lse = part_lse.new_empty(q_served.shape[:2])
        rows = _rows_of(call, q_served)
        first = rows if call.first_q is None else rows.index_select(0, call.first_q)
        out.index_copy_(0, first, _take(part_out, call.first_q))
        lse.index_copy_(0, first, _take(part_lse, call.first_q))
        for part in call.repeated_q:
            merge_partial(out, lse, rows.index_select(0, part), part_out[part], part_lse[part])
    if out is None or lse is None:
        return torch.empty_like(q_served), q_served.new_empty(
            q_served.shape[:2], dtype=torch.float32
        )
    return out, lse


def _rows_of(call: KernelCall, q_served: torch.Tensor) -> torch.Tensor:
    if call.q_rows is not None:
        return call.q_rows
    return torch.arange(q_served.shape[0], device=q_served.device)


def compute_gradients(
    kernel: Kernel,
    exchange: Exchange,
    served: tuple[torch.Tensor, ...],
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the served rows, float32: `(dq, dk, dv)`."""
    dout, q, k, v, out, lse = served
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    dv = torch.zeros_like(dk)
    for call in exchange.calls:
        parts = kernel.backward(
            _take(dout, call.q_rows),
            _take(q, call.q_rows),
            _take(k, call.kv_rows),
            _take(v, call.kv_rows),
            _take(out, call.q_rows),
            _take(lse, call.q_rows),
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            **_kernel_options(call, exchange, softmax_scale),
        )
        for total, part, rows in zip(
            (dq, dk, dv), parts, (call.q_rows, call.kv_rows, call.kv_rows), strict=True
        ):
            if rows is None:
                total += part
            else:
                total.index_add_(0, rows, part.float())
    return dq, dk, dv
