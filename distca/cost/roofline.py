"""Kernel times of inference: tasks of few queries, which memory bounds.

A decoded token is one query over thousands of keys. A kernel for it puts the query heads that share
a key-value head into one tile, so that a tile has as many queries as it would need rows without
them, and splits long keys over the GPU. What is left to wait for are the keys and values, read
from memory once. Tasks of many queries cost their tiles, as `TiledCost` has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.tiled import TiledCost
from distca.cost.volume import AttentionShape
from distca.plan.span import Floats, Int64s


@dataclass(frozen=True)
class RooflineCost:
    """A `CostModel`: the longer of the time of the tiles, and that of the rows through memory.

    Attributes:
        tiles: time of the tiles with one head's queries in each.
        shape: heads of the rank.
        bytes_per_second: memory that is read and written a second.
    """

    tiles: TiledCost
    shape: AttentionShape
    bytes_per_second: float

    @staticmethod
    def of_shape(
        shape: AttentionShape,
        flops_per_second: float,
        bytes_per_second: float,
        source: str = "a given rate",
    ) -> RooflineCost:
        """Returns the model for the heads of a rank."""
        return RooflineCost(
            TiledCost.of_shape(shape, flops_per_second, source), shape, bytes_per_second
        )

    @property
    def description(self) -> str:
        return f"{self.tiles.description}, or memory at {self.bytes_per_second / 1e9:,.0f} GB/s"

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`."""
        q, tile = np.maximum(np.asarray(q_len, dtype=np.float64), 1.0), self.tiles.tile
        together = self.shape.heads // self.shape.kv_heads
        rows = np.ceil(q / tile) * tile
        packed = np.ceil(q * together / tile) * tile / together
        tiles = self.tiles.seconds(q_len, kv_len, pairs) * np.minimum(packed / rows, 1.0)
        # Queries are read and outputs written.
        moved = q * (self.shape.q_row_bytes + self.shape.out_row_bytes)
        moved = moved + np.asarray(kv_len) * self.shape.kv_row_bytes
        seen = np.asarray(pairs) > 0
        result: Floats = np.where(seen, np.maximum(tiles, moved / self.bytes_per_second), 0.0)
        return result
