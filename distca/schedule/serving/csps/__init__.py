"""Communication-efficient sequence parallelism (CSPS): heads scattered over ranks, and attention
that keeps all near keys and some of the far ones, by levels of proximity. Pure functions of values.
"""

from distca.schedule.serving.csps.levels import LEVELS, Levels
from distca.schedule.serving.csps.pipeline import (
    NearToFar,
    pass_near_to_far,
    ranks_that_fit,
    shard_near,
    thinned,
)
from distca.schedule.serving.csps.sparsity import Sparsity, kept_count

__all__ = [
    "LEVELS",
    "Levels",
    "NearToFar",
    "Sparsity",
    "kept_count",
    "pass_near_to_far",
    "ranks_that_fit",
    "shard_near",
    "thinned",
]
