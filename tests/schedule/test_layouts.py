"""SP-NTP and SP-TP on split weights: the paper's rule, exact bytes, and rows between nodes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from distca.cost.link import Links
from distca.schedule.serving.csps.layouts import (
    SplitLayer,
    SplitModel,
    even_rows,
    gathered_rows,
    tokens_for_head_scatter,
)

MHA = SplitLayer(4096, 32, 32, 128, ranks=4, dtype_bytes=4, ranks_per_node=4)


def test_the_papers_rule() -> None:
    assert tokens_for_head_scatter(4096, 4) == 16_384
    assert tokens_for_head_scatter(16_384, 3) == 98_304
    assert tokens_for_head_scatter(4096, 2) == math.inf


def test_bytes_follow_the_rule_without_grouped_queries() -> None:
    """In float32, where sums are as wide as rows."""
    for tokens, layout in ((16_384, "sp-tp"), (16_388, "sp-ntp")):
        assert MHA.chosen("bytes", tokens) == MHA.chosen("paper", tokens) == layout
        assert MHA.chosen("sp-tp", tokens) == "sp-tp"
    two = replace(MHA, ranks=2, ranks_per_node=2)
    assert two.chosen("bytes", 2 * 10**9) == two.chosen("paper", 2 * 10**9) == "sp-tp"


def test_grouped_queries_scatter_sooner() -> None:
    """Fewer keys travel, and fewer weights: on two ranks, too."""
    for ranks in (2, 4):
        layer = replace(MHA, kv_heads=8, ranks=ranks, ranks_per_node=ranks)
        weights, each_row = 2 * 4096 * (4096 + 1024), 2 * 4096 - 2 * (4096 + 1024) / ranks
        above = weights / each_row
        assert layer.chosen("bytes", int(above // ranks * ranks)) == "sp-tp"
        assert layer.chosen("bytes", int(above // ranks * ranks + ranks)) == "sp-ntp"


@pytest.mark.parametrize(("kv_heads", "parts"), [(32, 4), (2, 2), (1, 1)])
def test_bytes_are_the_closed_form(kv_heads: int, parts: int) -> None:
    """Heads of keys that ranks share travel once to each rank that has another; with biases."""
    layer = replace(MHA, kv_heads=kv_heads, dtype_bytes=2, biases=True)
    ranks, tokens, hidden, row = 4, 1000, 4096, 32 * 128
    moved = layer.attention_bytes("sp-ntp", even_rows(tokens, ranks))
    keys = kv_heads * 128
    whole = row * (2 * hidden + 1) * (ranks - 1)
    whole += 2 * keys * (hidden + 1) * (parts - 1) * ranks // parts
    rows = tokens * (2 * row + 2 * keys * ranks // parts) * (ranks - 1) // ranks
    assert moved.total == 2 * (whole + rows)
    assert set(moved.sent() - moved.received()) == {0}
    gathers = layer.attention_bytes("sp-tp", even_rows(tokens, ranks))
    # Sums are in float32.
    assert gathers.total == (ranks - 1) * tokens * hidden * (2 + 4)


def test_a_row_goes_once_to_each_other_node() -> None:
    """As many bytes in all, and a part of them between nodes; on uneven rows."""
    rows = even_rows(1003, 8)
    flat, nodes = (replace(MHA, ranks=8, ranks_per_node=each) for each in (8, 4))
    for layout in ("sp-tp", "sp-ntp"):
        one, two = (each.attention_bytes(layout, rows) for each in (flat, nodes))
        assert one.total == two.total
        if layout == "sp-tp":
            links = Links(4)
            assert links.between_nodes(two) == 1003 * 4096 * (4 + 4)
            assert links.between_nodes(one) == 4 * links.between_nodes(two)
    between, within = gathered_rows(rows, 4)
    assert (between + within).sum(axis=0).tolist() == (1003 - rows).tolist()


def test_shared_rows_are_counted_by_sequence() -> None:
    split = SplitModel(replace(MHA, hidden_size=64, heads=4, kv_heads=2, head_dim=16), 3, "bytes")
    assert split.share(3) is None
    shared = split.share(11)
    assert shared is not None
    assert shared.rows.tolist() == [2, 3, 3, 3]
    of_block = split.layer.block_bytes(shared.rows).total
    of_attention = split.layer.attention_bytes(shared.layout, shared.rows).total
    assert shared.bytes_moved == 3 * (of_block + of_attention) + 11 * 3 * 64 * 4
    found = shared.bytes_by_sequence(np.array([7, 1, 3]))
    assert found.sum() == shared.bytes_moved
    assert found[0] == shared.bytes_moved * 7 // 11
