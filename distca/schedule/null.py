"""The null scheduler: no query moves."""

from __future__ import annotations

import numpy as np

from distca.plan import Mask, Placement, Plan, Tasks
from distca.plan.span import Int64s
from distca.schedule.base import ScheduleConfig


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
        at = placement
        tasks = Tasks(
            document=at.document,
            q_start=at.start,
            q_end=at.end,
            kv_start=mask.first_key(at.start),
            kv_end=at.end,
            server=at.rank,
        )
        return Plan(
            np.asarray(lengths, dtype=np.int64),
            placement,
            tasks,
            mask,
            self._config.block,
            scheduler="null",
        )
