"""Documents in turn on the ranks: whole ("packed"), or cut where a rank's tokens end ("plain").

*Plain* data parallelism is what Megatron does without context parallelism: the parts of a cut
document do not see each other. The scheduler *packed* keeps documents whole, so that its plans
cover the same pairs as those of the other schedulers.
"""

from __future__ import annotations

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.plan import Mask, Placement, Plan, place_in_turn
from distca.plan.span import Floats, Int64s
from distca.schedule.base import ScheduleConfig, document_loads, plan_at_home


def plain_loads(
    lengths: Int64s, capacities: Int64s, mask: Mask, cost_model: CostModel | None = None
) -> Floats:
    """Returns the load of each rank in plain data parallelism, `[ranks]`: the loads to balance.

    Documents are placed in turn and cut where a rank's tokens end. As in plain Megatron
    the parts of a cut document do not see each other, so all ranks together compute less than a
    plan for whole documents.

    Args:
        lengths: tokens of each document, int64 `[documents]`.
        capacities: tokens of each rank, int64 `[ranks]`; their sum is the documents'.
        mask: attention mask of all documents.
        cost_model: predicts seconds; None: loads are visible pairs.
    """
    placement = place_in_turn(lengths, capacities)
    loads = document_loads(placement.end - placement.start, mask, cost_model)
    return np.bincount(placement.rank, weights=loads, minlength=len(capacities)).astype(np.float64)


class PackedScheduler:
    """Documents placed in turn, whose queries their owners compute.

    No query moves. A rank receives keys and values from the owners of a document's earlier tokens;
    if no document spans ranks, nothing moves at all, and the plan is plain data parallelism.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.plan` says."""
        return self.schedule(lengths, place_in_turn(lengths, capacities), mask)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.schedule` says."""
        return plan_at_home("packed", self._config, lengths, placement, mask)
