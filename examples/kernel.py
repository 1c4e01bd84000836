"""A complete training kernel in plain torch: slow, and exact.

A kernel computes tasks of one shape and knows nothing of ranks (`distca/attention/kernel.py`). It
differs from most attention libraries in two ways:

- A task may be partial: its rows see other keys in other tasks. `forward` returns the log-sum-exp
  (LSE) of the scores, by which partial outputs are merged. `backward` uses the final output and LSE
  that it gets, not those of its own keys.
- A causal task is aligned at the lower right: with 5 queries and 64 keys the last query sees all 64
  keys, the first one 60.

Inference also needs `forward_paged` (`distca/attention/paged.py`), for keys in the blocks of a
pool.

To add one:

1. Put it in a file in `distca/attention`. Import GPU packages where they are used, with an error
   that says what to install.
2. GPU kernels get an entry in `GPU_KERNELS` (`distca/attention/choice.py`), others a case in
   `select_kernel`. The backward pass may allocate what `distca/cost/kernel_memory.py` counts.
3. It must pass the cases of `tests/attention/test_attention.py`.
4. Measure it: `distca profile --output profile.json`.
"""

from __future__ import annotations

import torch

from distca.attention.reference import task_visibility


class PlainKernel:
    def forward(self, q_THD, k_THD, v_THD, tasks):
        out = torch.zeros_like(q_THD)
        lse = torch.full(q_THD.shape[:2], float("-inf"), device=q_THD.device)
        for rows, keys in _rows_and_keys(tasks):
            scores, v = _scores(q_THD[rows], k_THD[keys], v_THD[keys], tasks)
            lse[rows] = scores.logsumexp(dim=-1).T
            weights = (scores - lse[rows].T[:, :, None]).exp().nan_to_num()
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out, lse

    def backward(self, dout_THD, q_THD, k_THD, v_THD, out_THD, lse_TH, tasks):
        dq, dk, dv = (torch.zeros_like(x) for x in (q_THD, k_THD, v_THD))
        groups = q_THD.shape[1] // k_THD.shape[1]
        for rows, keys in _rows_and_keys(tasks):
            scores, v = _scores(q_THD[rows], k_THD[keys], v_THD[keys], tasks)
            k = k_THD[keys].float().repeat_interleave(groups, dim=1)
            dout, out, q = (x[rows].float() for x in (dout_THD, out_THD, q_THD))
            weights = (scores - lse_TH[rows].T[:, :, None]).exp().nan_to_num()
            # How much of a row's output gradient its own output takes up: over all its keys.
            taken = (dout * out).sum(dim=-1).T[:, :, None]
            dscores = weights * (torch.einsum("qhd,khd->hqk", dout, v) - taken)
            dscores = dscores * tasks.softmax_scale
            dq[rows] = torch.einsum("hqk,khd->qhd", dscores, k).to(dq.dtype)
            for total, part in (
                (dk, torch.einsum("hqk,qhd->khd", dscores, q)),
                (dv, torch.einsum("hqk,qhd->khd", weights, dout)),
            ):
                total[keys] = part.unflatten(1, (-1, groups)).sum(dim=2).to(total.dtype)
        return dq, dk, dv


def _rows_and_keys(tasks):
    q, kv = tasks.cu_seqlens_q.tolist(), tasks.cu_seqlens_kv.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(kv[i], kv[i + 1])


def _scores(q, k, v, tasks):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    visible = task_visibility(len(q), len(k), causal=tasks.causal, window_left=tasks.window_left)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * tasks.softmax_scale
    return scores.masked_fill(~visible.to(q.device), float("-inf")), v
