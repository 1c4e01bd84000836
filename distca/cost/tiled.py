"""Kernel times from two figures of a kernel, its highest rate and its tile.

A fused kernel gives each thread block a tile of queries and runs it over tiles of keys. Tasks that
are shorter than a tile, or that cut through one, pay for whole tiles (paper, Section 3.3:
throughput drops below 128 tokens), as do the tiles on the diagonal. Otherwise the rate does not
depend on the length, since a call runs all tasks of a server at once and fills the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan.span import Floats, Int64s


@dataclass(frozen=True)
class TiledCost:
    """A `CostModel` of whole tiles at a constant rate.

    Attributes:
        flops_per_pair: operations of a visible pair, over all heads.
        flops_per_second: rate of long tasks.
        tile: queries of a tile, and keys of a tile.
        source: origin of the rate, for reports.
    """

    flops_per_pair: float
    flops_per_second: float
    tile: int = 128
    source: str = "a given rate"

    @staticmethod
    def of_shape(
        shape: AttentionShape, flops_per_second: float, source: str = "a given rate"
    ) -> TiledCost:
        """Returns the model for the heads of a rank."""
        return TiledCost(shape.flops_per_pair, flops_per_second, source=source)

    @property
    def description(self) -> str:
        rate = self.flops_per_second / 1e12
        return f"whole tiles of {self.tile} at {rate:.0f} TFLOP/s, {self.source}"

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`. A windowed task costs its share of the pairs without window."""
        q, kv = (np.asarray(x, dtype=np.float64) for x in (q_len, kv_len))
        seen = np.asarray(pairs, dtype=np.float64)
        full = seen >= q * kv
        rows, keys = (np.ceil(x / self.tile) * self.tile for x in (q, kv))
        # In a task that ends on the diagonal, each row of tiles has one tile more than that above.
        below = rows * (np.maximum(keys, rows) - rows) + rows * (rows + self.tile) / 2
        visible = q * np.maximum(kv, q) - q * (q - 1) / 2
        share = np.where(full, 1.0, np.minimum(seen / np.maximum(visible, 1.0), 1.0))
        tiles = np.where(full, rows * keys, share * below)
        result: Floats = np.where(seen > 0, tiles, 0.0) * (
            self.flops_per_pair / self.flops_per_second
        )
        return result
