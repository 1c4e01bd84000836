"""The cost of kernels that compute whole tiles."""

from __future__ import annotations

import numpy as np

from distca.cost.tiled import TiledCost


def test_tiles_of_a_kernel() -> None:
    cost = TiledCost(2.0, 1.0)
    lengths = np.array([128, 256, 1, 300])
    squares = cost.seconds(lengths, lengths, lengths * lengths) / 2
    assert squares.tolist() == [128**2, 256**2, 128**2, 384**2]
    diagonal = cost.seconds(lengths, lengths, lengths * (lengths + 1) // 2) / 2
    # Of a triangle of tiles those on the diagonal are whole.
    assert diagonal.tolist() == [128**2, 3 * 128**2, 128**2, 6 * 128**2]
    q, kv = np.array([128]), np.array([512])
    assert cost.seconds(q, kv, q * kv - q * (q - 1) // 2)[0] / 2 == 128 * 512
    assert cost.seconds(q, kv, q * 0)[0] == 0
