"""The null scheduler: no query moves."""

from __future__ import annotations

import numpy as np

from distca.plan import Mask, Placement, Plan
from distca.plan.span import Int64s
from distca.schedule.base import ScheduleConfig, tasks_at_home


class NullScheduler:
    """Every rank computes the queries that it owns.

    Keys and values come to it from the ranks that own a document's earlier tokens: context
    parallelism of the documents that span ranks. Where documents fit their rank nothing moves, and
    the plan is plain data parallelism.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """See `Scheduler.schedule`."""
        return Plan(
            np.asarray(lengths, dtype=np.int64),
            placement,
            tasks_at_home(placement, mask),
            mask,
            self._config.block,
            scheduler="null",
        )
