"""The benchmark of hybrid context parallelism, where its answers are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.plans.hybrid_cp import SERVERS, WAYS, measure
from distca.cost.model_sizes import MODELS
from distca.simulate import CLUSTERS, ModelCosts

COSTS = ModelCosts(MODELS["llama-34b"], CLUSTERS["dgx-h200"], 8)
K64 = 65_536


@pytest.mark.parametrize("name", [name for name, _ in WAYS])
def test_equal_documents_are_balanced(name: str) -> None:
    row = measure(name, None, np.full(SERVERS, K64), COSTS)
    assert (row.tokens, row.rounds, row.gb_total) == (1.0, 1, 0.0)
    assert row.layer_time == pytest.approx(1.0)


def test_a_long_document_makes_its_ranks_late() -> None:
    """Two ranks share one of twice the length: half of its attention each, twice a short one's."""
    kernel = COSTS.cluster.attention_cost(COSTS.shape)
    linear = K64 * (sum(COSTS.pre_seconds()) + sum(COSTS.post_seconds()))
    both = 1 + COSTS.cluster.backward_over_forward
    tokens = np.array([K64, 2 * K64])
    short, long = both * kernel.seconds(tokens, tokens, tokens * (tokens + 1) // 2)
    mean = linear + (short * (SERVERS - 2) + long) / SERVERS
    lengths = np.array([2 * K64, *[K64] * (SERVERS - 2)])
    hybrid, tiles = (measure(name, None, lengths, COSTS) for name in ("hybrid-cp", "tiles"))
    assert hybrid.layer_time == pytest.approx((linear + long / 2) / mean, rel=1e-3)
    assert hybrid.tokens == 1.0
    assert tiles.layer_time < hybrid.layer_time - 0.1
    # A smaller limit is two rounds, in which ranks wait: the ranks of the first are all of them.
    assert measure("hybrid-cp", 64, lengths, COSTS).rounds > 1
