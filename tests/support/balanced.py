"""Strategies by which tiles of prompts move as soon as loads differ."""

from __future__ import annotations

from distca.cost.kernel_time import AnalyticCost
from distca.cost.link import Links
from distca.cost.volume import AttentionShape
from distca.schedule.base import ScheduleConfig
from distca.schedule.serving.balanced import BalancedTiles

BLOCK = 4


def eager_tiles(
    shape: AttentionShape,
    block: int = BLOCK,
    tolerance: float = 0.0,
    latency: float = 0.0,
    flops_per_second: float = 1e6,
    speeds: tuple[float, ...] | None = None,
    ranks_per_node: int = 64,
) -> BalancedTiles:
    """Kernels so slow that hardly any exchange is charged for, and tiles as small as a block."""
    cost_model = AnalyticCost.of_shape(shape, flops_per_second)
    links = Links(ranks_per_node)
    config = ScheduleConfig(tolerance, shape, cost_model, block, links, speeds)
    return BalancedTiles(config, latency)
