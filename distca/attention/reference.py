"""Attention by its definition, over all tokens at once: slow, readable, in any precision."""

from __future__ import annotations

import torch

from distca.attention.kernel import Gradients, KernelTasks


def attend(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    visible_QK: torch.Tensor,
    softmax_scale: float,
    sink_H: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes softmax(QKᵀ)V over the visible pairs; differentiable.

    Args:
        q_THD: `[queries, heads, head_dim]`.
        k_THD: `[keys, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        v_THD: values, `[keys, kv_heads, v_head_dim]`.
        visible_QK: whether a query sees a key, bool `[queries, keys]`, or of each key-value head
            `[kv_heads, queries, keys]`.
        softmax_scale: factor of the scores.
        sink_H: one more logit of each head, which has no value, `[heads]`, or None.
        softcap: bound of the scores, which `softcap * tanh(score / softcap)` replaces, or None.

    Returns:
        `(out, lse)`: `[queries, heads, v_head_dim]` and `[queries, heads]` in the inputs' dtype; 0
        and minus infinity for a query that sees no key.
    """
    group = q_THD.shape[1] // k_THD.shape[1]
    k = k_THD.repeat_interleave(group, dim=1)
    v = v_THD.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q_THD, k) * softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_QK if visible_QK.dim() == 2 else visible_QK.repeat_interleave(group, dim=0)
    scores = scores.masked_fill(~visible, float("-inf"))
    lse_HQ = scores.logsumexp(dim=-1)
    if sink_H is not None:
        lse_HQ = torch.logaddexp(lse_HQ, sink_H[:, None])
    shift = lse_HQ.masked_fill(lse_HQ == float("-inf"), 0.0).unsqueeze(-1)
    weights = torch.exp(scores - shift)
    return torch.einsum("hqk,khd->qhd", weights, v), lse_HQ.transpose(0, 1)


def task_visibility(
    queries: int, keys: int, *, causal: bool, window_left: int | None = None
) -> torch.Tensor:
    """Returns whether each query of a task sees each key (`KernelTasks`): bool
    `[queries, keys]`."""
    if not causal:
        return torch.ones(queries, keys, dtype=torch.bool)
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)[None, :]
    visible = distance >= 0
    return visible if window_left is None else visible & (distance <= window_left)


def document_visibility(
    lengths: list[int], window_left: int | None = None, attention_chunk: int | None = None
) -> torch.Tensor:
    """Returns whether each token of packed documents sees each other: bool `[tokens, tokens]`.

    With `attention_chunk` tokens see their own chunk of that many tokens of the document alone.
    """
    tokens = sum(lengths)
    visible = torch.zeros(tokens, tokens, dtype=torch.bool)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        visible[own, own] = task_visibility(length, length, causal=True, window_left=window_left)
        if attention_chunk is not None:
            chunk = torch.arange(length) // attention_chunk
            visible[own, own] &= chunk[:, None] == chunk[None, :]
        start += length
    return visible


def attend_tasks(
    dout_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    tasks: KernelTasks,
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """Computes what `Kernel.forward` and `Kernel.backward` do, task by task, in float64 on the CPU.

    Returns:
        `(out, lse, (dq, dk, dv))`; a row that sees no key has no gradient.
    """
    dout, q, k, v = (each.detach().double().cpu() for each in (dout_THD, q_THD, k_THD, v_THD))
    q, k, v = (each.requires_grad_() for each in (q, k, v))
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(0, q.shape[1])]
    q_edges, kv_edges = tasks.cu_seqlens_q.tolist(), tasks.cu_seqlens_kv.tolist()
    for task in range(len(q_edges) - 1):
        rows = slice(q_edges[task], q_edges[task + 1])
        columns = slice(kv_edges[task], kv_edges[task + 1])
        visible = task_visibility(
            rows.stop - rows.start,
            columns.stop - columns.start,
            causal=tasks.causal,
            window_left=tasks.window_left,
        )
        out, lse = attend(
            q[rows], k[columns], v[columns], visible, tasks.softmax_scale, softcap=tasks.softcap
        )
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs), torch.cat(lses)
    if out.requires_grad:
        out.backward(dout)  # type: ignore[no-untyped-call]
    dq, dk, dv = (torch.zeros_like(x) if x.grad is None else x.grad.nan_to_num() for x in (q, k, v))
    return out.detach(), lse.detach(), (dq, dk, dv)
