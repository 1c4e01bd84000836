"""Packed: what data parallelism does without disaggregation."""

from __future__ import annotations

from distca.plan import Mask, Placement, Plan, place_in_turn
from distca.plan.span import Int64s
from distca.schedule.base import ScheduleConfig, plan_at_home


class PackedScheduler:
    """Documents one after the other, and every rank computes the queries that it owns.

    No query moves. Keys and values come to a rank from those that own a document's earlier tokens;
    where documents fit their rank nothing moves at all, and the plan is plain data parallelism.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def plan(self, lengths: Int64s, rooms: Int64s, mask: Mask) -> Plan:
        """See `Scheduler.plan`."""
        return self.schedule(lengths, place_in_turn(lengths, rooms), mask)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """See `Scheduler.schedule`."""
        return plan_at_home("packed", self._config, lengths, placement, mask)
