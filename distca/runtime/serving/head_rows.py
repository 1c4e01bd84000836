"""Rows of plans whose documents are head groups of sequences: a token has a row for each group.

Queries and outputs are ordered by group, then token. Keys and values stay where they lie: a token's
heads lie side by side, so its rows of the groups do.
"""

from __future__ import annotations

import numpy as np
import torch

from distca.plan.span import Int64s


def query_rows(q_THD: torch.Tensor, groups: int) -> torch.Tensor:
    """Puts groups of heads behind each other: `[groups * tokens, heads / groups, head_dim]`."""
    if groups == 1:
        return q_THD
    tokens, heads, dim = q_THD.shape
    return q_THD.view(tokens, groups, heads // groups, dim).transpose(0, 1).flatten(0, 1)


def token_rows(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Puts groups of heads beside each other again, the inverse of `query_rows`."""
    if groups == 1:
        return rows
    count, heads, dim = rows.shape
    return rows.view(groups, count // groups, heads, dim).transpose(0, 1).flatten(1, 2)


def key_rows(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Views `[places, kv_heads, head_dim]` as rows of one group's heads each."""
    parts = min(groups, rows.shape[1])
    return rows.view(rows.shape[0] * parts, rows.shape[1] // parts, rows.shape[2])


def key_places(places: Int64s, groups: int, kv_heads: int) -> Int64s:
    """Returns where rows of `key_rows` lie, group by group: groups may have the same head.

    Args:
        places: where each token's keys lie, int64 `[tokens]`.
        groups: head groups.
        kv_heads: heads of keys and values.
    """
    parts = min(groups, kv_heads)
    part = np.arange(groups) * parts // groups
    return (places * parts + part[:, None]).ravel()
