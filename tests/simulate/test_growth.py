"""Groups that grow between two chunks: which rows move, and what that adds on slow links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distca.cost.model_sizes import MODELS
from distca.simulate import CLUSTERS
from distca.simulate.serving import Growth, InferenceCosts, simulate_growth

MODEL = MODELS["llama-8b"]


def grown(gb_per_s: float, first: int, second: int) -> tuple[Growth, float]:
    """A prompt on 4 and then 8 ranks of a node each, and the seconds of its moves on a link."""
    cluster = replace(CLUSTERS["dgx-h100"], gpus_per_node=1, network_gb_per_s=gb_per_s)
    costs = InferenceCosts(MODEL, cluster)
    found = simulate_growth(costs, (first, second), (4, 8))
    sent = found.second.bytes_sent["cache balancing"]
    assert found.rows == first // 2
    assert sent.sum() == found.rows * costs.shape.kv_row_bytes * MODEL.layers
    # Old members send equally much, and new ones nothing.
    assert sent.tolist() == [sent.sum() / 4] * 4 + [0] * 4
    return found, sent[0] / (gb_per_s * 1e9)


def test_moves_hide_behind_the_layer_before() -> None:
    found, on_link = grown(50.0, 32768, 32768)
    total = found.first.seconds + found.second.seconds
    assert on_link / total > 0.01
    assert 0 < found.exposed < 0.001
    # A link that is too slow for the attention's own rows hides nothing.
    found, on_link = grown(1.0, 32768, 32768)
    assert found.second.seconds - found.free.seconds == pytest.approx(on_link, rel=0.05)


@pytest.mark.parametrize(("first", "second"), [(32768, 32768), (16384, 49152), (49152, 16384)])
def test_on_slow_links_they_add_at_most_a_twentieth(first: int, second: int) -> None:
    """Even where ranks wait for the attention's own rows most of the time."""
    for speed in (25.0, 12.5, 6.0):
        found, _ = grown(speed, first, second)
        assert found.exposed <= 0.05
    assert found.free.exposed.max() / found.free.seconds > 0.5
