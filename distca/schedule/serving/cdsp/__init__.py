"""Chunkwise dynamic sequence parallelism (Tetris): groups of ranks that grow.

* who prefills: `chunks.py` has Algorithms 1 to 3, `groups.py` the choice of ranks, `strategies.py`
  what these are compared with, `growing.py` what the scheduler calls;
* what they depend on: `latency.py` seconds of a prefill, `load.py` improvement rates by arrivals.

All are pure functions of values.
"""

from distca.schedule.serving.cdsp.chunks import Chunk, PrefillPlan, Search, plan_prefill
from distca.schedule.serving.cdsp.latency import (
    TABLE_1,
    Coefficients,
    Prefill,
    PrefillModel,
    PrefillTimes,
    published_model,
)
from distca.schedule.serving.cdsp.load import ImprovementRates, Load, least_by_rate
from distca.schedule.serving.cdsp.strategies import LOAD_AWARE, PREFILL_STRATEGIES, GroupStrategy

__all__ = [
    "LOAD_AWARE",
    "PREFILL_STRATEGIES",
    "TABLE_1",
    "Chunk",
    "Coefficients",
    "GroupStrategy",
    "ImprovementRates",
    "Load",
    "Prefill",
    "PrefillModel",
    "PrefillPlan",
    "PrefillTimes",
    "Search",
    "least_by_rate",
    "plan_prefill",
    "published_model",
]
