"""Communication-efficient sequence parallelism (CSPS): heads scattered over ranks, and attention
that keeps all near keys and some of the far ones, by levels of proximity. Pure functions of values.
"""

from distca.schedule.serving.csps.levels import LEVELS, NODE_PARTS, Levels, NodeParts
from distca.schedule.serving.csps.sparsity import Sparsity, kept_count

__all__ = ["LEVELS", "NODE_PARTS", "Levels", "NodeParts", "Sparsity", "kept_count"]
