"""The cost of tasks with few queries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distca.cost.roofline import RooflineCost
from distca.cost.volume import AttentionShape

GROUPED = AttentionShape(16, 1, 128)
FLOPS, MEMORY = 400e12, 3.35e12


def seconds(shape: AttentionShape, q: int, kv: int, causal: bool = False) -> tuple[float, float]:
    """Seconds of a task by the roofline, and by its tiles alone."""
    cost = RooflineCost.of_shape(shape, FLOPS, MEMORY)
    task = *(np.array([x]) for x in (q, kv)), np.array([q * kv - causal * q * (q - 1) // 2])
    return float(cost.seconds(*task)[0]), float(cost.tiles.seconds(*task)[0])


def test_a_decoded_token_costs_its_keys() -> None:
    """One query was charged a tile of 128; what it waits for are keys and values from memory."""
    keys = 131072
    rows = 2 * GROUPED.q_row_bytes + keys * GROUPED.kv_row_bytes
    # Of 16 heads that share their keys, 8 queries fill a tile: that takes a little longer.
    packed = 8 * keys * 4 * 16 * 128 / FLOPS
    assert seconds(GROUPED, 1, keys)[0] == pytest.approx(max(rows / MEMORY, packed))
    assert packed / (rows / MEMORY) == pytest.approx(1.07, abs=0.01)
    assert seconds(GROUPED, 1, keys)[1] == pytest.approx(16 * packed)
    # Without shared heads a query cannot fill a tile.
    single = AttentionShape(16, 16, 128)
    assert seconds(single, 1, keys)[0] == seconds(single, 1, keys)[1]
    # Memory bounds where it is slower.
    slow = RooflineCost.of_shape(GROUPED, FLOPS, MEMORY / 10)
    one = np.array([1]), np.array([keys]), np.array([keys])
    assert float(slow.seconds(*one)[0]) == pytest.approx(rows / MEMORY * 10)
    assert float(slow.seconds(one[0], one[1], one[2] * 0)[0]) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_many_queries_cost_their_tiles(causal: bool) -> None:
    found, tiles = seconds(GROUPED, 4096, 8192, causal)
    assert found == tiles
    # More queries never take less time, and costs do not jump at a tile.
    times = [seconds(GROUPED, q, 8192, causal)[0] for q in range(1, 300)]
    assert all(b >= a * 0.999 for a, b in itertools.pairwise(times))
