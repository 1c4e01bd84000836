"""The baseline WLB-LLM (Wang et al., OSDI 2025): no query moves between groups.

* **Variable-length packing**: documents stay whole within a context-parallel group, the heaviest
  first onto the group with the least attention so far; groups hold different numbers of tokens,
  within a bound of memory: by default `MEMORY_FACTOR` times the equal share. A group takes even a
  document that is longer. (Linear layers then take different times, which this project counts
  elsewhere: only core attention is balanced here, WLB-LLM's ideal case, unless the cost model
  includes the linear layers.)
* **Adaptive sharding**: each group shards either every document head-tail over its ranks or the
  whole sequence in zigzag, whichever has the smaller predicted load on its busiest rank; documents
  give equal pairs, the sequence gives longer pieces, on which kernels run faster.
* **Outlier delay** (`delay_outliers`): very long documents wait until there is one for every group.
  As this changes which documents are trained on together, it applies to a stream of batches, not
  to a plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from distca.plan import Mask, Placement, Plan
from distca.plan.span import Int64s
from distca.schedule.base import (
    ScheduleConfig,
    document_loads,
    plan_at_home,
    server_loads,
    tasks_at_home,
)
from distca.schedule.baselines.context_parallel import group_size, shard_documents, shard_sequence

MEMORY_FACTOR = 1.17
"""Tokens of a group over the equal share: the most memory that variable-length packing was observed
to need (DistCA paper, Section 3)."""


class WlbLlm:
    """WLB-LLM's packing and sharding, as the module describes them.

    Ranks own different numbers of tokens: only the sum of `capacities` counts.

    Args:
        config: cost model and size of groups.
        most_tokens: most tokens of a group; None: `MEMORY_FACTOR` times the equal share.
    """

    def __init__(self, config: ScheduleConfig, most_tokens: int | None = None) -> None:
        self._config, self._most_tokens = config, most_tokens

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.plan` says.

        Raises:
            ValueError: the ranks don't divide into groups.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        size = group_size(self._config, lengths, capacities)
        loads = document_loads(lengths, mask, self._config.cost_model)
        count = len(capacities) // size
        most = self._most_tokens
        if most is None:
            most = int(MEMORY_FACTOR * lengths.sum() / count)
        groups = _pack(lengths, loads, count, max(most, int(lengths.max(initial=0))))
        per_document, per_sequence = (
            shard(groups, size) for shard in (shard_documents, shard_sequence)
        )
        # Every group chooses for itself.
        best = [
            self._busiest_of_groups(placement, mask, size)
            for placement in (per_document, per_sequence)
        ]
        by_document = best[0] <= best[1]
        kept = [
            placement.select(by_document[placement.rank // size] == wanted)
            for placement, wanted in ((per_document, True), (per_sequence, False))
        ]
        return self.schedule(lengths, Placement.concatenate(kept), mask)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.schedule` says."""
        return plan_at_home("wlb-llm", self._config, lengths, placement, mask)

    def _busiest_of_groups(self, placement: Placement, mask: Mask, size: int) -> np.ndarray:
        tasks = tasks_at_home(placement, mask)
        loads = server_loads(tasks, mask, placement.world_size, self._config.cost_model)
        return loads.reshape(-1, size).max(axis=1)


def _pack(lengths: Int64s, loads: np.ndarray, groups: int, most: int) -> Placement:
    """Packs whole documents into groups of at most `most` tokens, as far as that is possible."""
    room = [most] * groups
    by_load = [(0.0, group) for group in range(groups)]
    chosen = np.empty(len(lengths), dtype=np.int64)
    for document in np.lexsort((np.arange(len(lengths)), -loads)).tolist():
        length, set_aside = int(lengths[document]), []
        while by_load and room[by_load[0][1]] < length:
            set_aside.append(heapq.heappop(by_load))
        if by_load:
            load, group = heapq.heappop(by_load)
        else:
            # No group has room for the document: the one with most room takes it.
            load, group = max(set_aside, key=lambda entry: (room[entry[1]], -entry[1]))
            set_aside.remove((load, group))
        chosen[document] = group
        room[group] -= length
        heapq.heappush(by_load, (load + float(loads[document]), group))
        for entry in set_aside:
            heapq.heappush(by_load, entry)
    order = np.lexsort((np.arange(len(lengths)), chosen))
    return Placement(
        order, np.zeros(len(order), dtype=np.int64), lengths[order], chosen[order], groups
    )


def delay_outliers(batches: Sequence[Int64s], groups: int, threshold: int) -> list[Int64s]:
    """Delays very long documents until there is one for every group.

    Args:
        batches: document lengths of each global batch, int64.
        groups: number of context-parallel groups, or of micro-batches.
        threshold: length above which documents wait.

    Returns:
        As many batches, with other numbers of tokens. Documents that still wait at the end join
        the last batch.
    """
    waiting: list[int] = []
    delayed = []
    for number, batch in enumerate(batches):
        waiting += batch[batch > threshold].tolist()
        last = number == len(batches) - 1
        released = len(waiting) if last else len(waiting) // groups * groups
        now = np.array(waiting[:released], dtype=np.int64)
        waiting = waiting[released:]
        delayed.append(np.concatenate([now, batch[batch <= threshold]]))
    return delayed
