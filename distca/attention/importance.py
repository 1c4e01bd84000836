"""Importance of tokens: which of them attention keeps, where it may not keep all.

The importance of a token in a key-value head is the attention that its key is given there: the sum
of the softmax's weights, over some observing queries and the query heads of the group. Observers
are few, a rank's last queries, so that this takes a product of few rows; the weights are those of
the whole attention, far keys included, as its final LSE tells.

Among equally important tokens the later ones are kept, so that a choice is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def attention_given(
    q_WHD: torch.Tensor,
    k_KHD: torch.Tensor,
    lse_WH: torch.Tensor,
    visible_WK: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Sums the softmax's weights that observing queries give to keys, float32 `[keys, kv_heads]`.

    Args:
        q_WHD: observing queries, `[observers, heads, head_dim]`.
        k_KHD: keys, `[keys, kv_heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        lse_WH: final LSE of the queries, over all their keys, float32 `[observers, heads]`.
        visible_WK: whether a query sees a key, bool `[observers, keys]`.
        softmax_scale: factor of the scores.
    """
    kv_heads = k_KHD.shape[1]
    # Query heads of a group are neighbours.
    q = q_WHD.float().reshape(len(q_WHD), kv_heads, -1, q_WHD.shape[2])
    scores = torch.einsum("whgd,khd->hgwk", q, k_KHD.float()) * softmax_scale
    lse = lse_WH.float().reshape(len(lse_WH), kv_heads, -1).permute(1, 2, 0)
    # No weight is above 1; scores that a model caps may be above its LSE.
    weights = torch.exp((scores - lse.unsqueeze(-1)).clamp_(max=0.0)).masked_fill_(~visible_WK, 0.0)
    return weights.sum(dim=(1, 2)).T.contiguous()


def most_important(importance_RH: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Chooses rows of each key-value head, in their order: int64 `[counts[head]]` for each.

    Args:
        importance_RH: importance of each row, `[rows, kv_heads]`.
        counts: rows that are chosen in each head.
    """
    rows = importance_RH.shape[0]
    if min(counts) == rows:
        return (torch.arange(rows, device=importance_RH.device),) * len(counts)
    order = torch.argsort(importance_RH.flip(0), dim=0, descending=True, stable=True)
    best = rows - 1 - order
    return tuple(torch.sort(best[:count, head]).values for head, count in enumerate(counts))
