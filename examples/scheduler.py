"""A complete scheduler: documents stay where `packed` puts them, and each piece's attention goes to
the least loaded server, the largest piece first.

It is an example of the interface (`distca/schedule/base.py`), not a good scheduler, since it cuts
no task. `plan` chooses the placement; `schedule` gets one. Both are pure functions: every rank
calls them and must get the same plan.

To add one:

1. Put it in a file in `distca/schedule`, and add an entry to `COMPARED` in
   `distca/schedule/schedulers.py`. `--distca-scheduler`, `distca plan --compare`,
   `benchmarks/plans/schedulers.py` and the parity tests then use it. If it moves tasks away from
   the owners of their queries, also add its name to `BALANCING`, so that `--tolerance` applies to
   it.
2. Test it: `validate_plan` checks that each visible pair is in exactly one task and all cuts are
   legal, `tests/support/batches.py` has random batches, and `distca.schedule.describe` gives
   balance and bytes.

A good scheduler keeps loads within `config.tolerance` of the mean (divided by `config.speeds_of`),
sends few bytes on the busiest rank (`distca.cost.volume.plan_bytes`), makes no task of fewer rows
than `config.least_rows()`, cuts at multiples of `config.block`, and plans in a few milliseconds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.plan import Mask, Placement, Plan, place_in_turn
from distca.plan.span import Int64s
from distca.schedule.base import ScheduleConfig, task_loads, tasks_at_home


class LargestFirst:
    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        return self.schedule(lengths, place_in_turn(lengths, capacities), mask)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        tasks = tasks_at_home(placement, mask)
        loads = task_loads(tasks, mask, self._config.cost_model)
        busy, server = np.zeros(placement.world_size), np.empty_like(tasks.server)
        for task in np.argsort(-loads, kind="stable"):
            server[task] = busy.argmin()
            busy[server[task]] += loads[task]
        tasks = replace(tasks, server=server)
        return Plan(lengths, placement, tasks, mask, self._config.block, scheduler="largest-first")
