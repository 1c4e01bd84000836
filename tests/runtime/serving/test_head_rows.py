"""Rows of groups of heads: by group, then token, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distca.runtime.serving.stepped_call import key_places, key_rows, query_rows, token_rows

TOKENS, HEADS, DIM = 5, 8, 3


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_queries_lie_by_group_and_come_back(groups: int) -> None:
    q_THD = torch.randn(TOKENS, HEADS, DIM)
    rows = query_rows(q_THD, groups)
    assert rows.shape == (groups * TOKENS, HEADS // groups, DIM)
    for group, of_group in enumerate(rows.view(groups, TOKENS, HEADS // groups, DIM)):
        heads = slice(group * HEADS // groups, (group + 1) * HEADS // groups)
        assert torch.equal(of_group, q_THD[:, heads])
    assert torch.equal(token_rows(rows, groups), q_THD)


@pytest.mark.parametrize(("groups", "kv_heads"), [(1, 4), (2, 4), (4, 4), (4, 2), (4, 1)])
def test_keys_of_a_group_are_found_where_they_lie(groups: int, kv_heads: int) -> None:
    """Where there are more groups than heads of keys, several have the same."""
    keys, places = torch.randn(7, kv_heads, DIM), np.array([6, 0, 3])
    found = key_rows(keys, groups)[torch.from_numpy(key_places(places, groups, kv_heads))]
    width = max(kv_heads // groups, 1)
    assert found.shape == (groups * len(places), width, DIM)
    for group, of_group in enumerate(found.view(groups, len(places), width, DIM)):
        first = group * kv_heads // groups
        assert torch.equal(of_group, keys[torch.from_numpy(places), first : first + width])
