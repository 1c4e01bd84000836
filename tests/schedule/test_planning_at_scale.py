"""What planning takes grows in proportion to the servers, counted instead of timed.

Lines of Python that are executed stand for candidates that are looked at one by one, the peak of
allocated memory for the tables that they are in.
"""

from __future__ import annotations

import sys
import tracemalloc
from types import FrameType
from typing import Any

import numpy as np

from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape, plan_bytes
from distca.documents.lengths import DISTRIBUTIONS, Capped, draw
from distca.plan import Mask, Plan, validate_plan
from distca.schedule import ScheduleConfig, even_capacities, make_scheduler

SHAPE = AttentionShape(32, 8, 128)


def plan_of(servers: int) -> Plan:
    lengths = draw(Capped(DISTRIBUTIONS["lognormal"], 131_072), servers * 65_536, seed=0)
    scheduler = make_scheduler("tiles", ScheduleConfig(shape=SHAPE))
    return scheduler.plan(lengths, even_capacities(int(lengths.sum()), servers), Mask())


def lines_a_server(servers: int) -> float:
    """Counts the lines of Python, in this package and in libraries, that a plan takes."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        plan_of(servers)
    finally:
        sys.settrace(before)
    return lines / servers


def bytes_a_server(servers: int) -> float:
    """Measures the peak of memory that planning, checking and measuring a plan allocate."""
    tracemalloc.start()
    try:
        plan = plan_of(servers)
        validate_plan(plan)
        assert plan_bytes(plan, SHAPE).total > 0
        assert np.all(plan_memory(plan, SHAPE).total(1) > 0)
        return tracemalloc.get_traced_memory()[1] / servers
    finally:
        tracemalloc.stop()


def test_a_server_takes_no_more_among_many() -> None:
    for measure in (lines_a_server, bytes_a_server):
        # The first plan of a process executes lines that are needed once.
        many, few = measure(2048), measure(256)
        assert many < 1.5 * few
