"""A warning where a baseline's context-parallel groups have one rank, and so shard nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.schedule import GlobalBatchPlanner, PlannedMicroBatch
from distca.schedule.baselines.context_parallel import group_size

_WITHOUT_GROUPS = {
    "per-document-cp": "is the same as packed",
    "ring-zigzag": "has the placement of packed",
    "wlb-llm": "packs whole documents, and shards none, which is packed with another packing",
}
"""How baselines with context-parallel groups behave where groups have one rank, by name."""


def warning_of_groups_of_one(
    planner: GlobalBatchPlanner, micro_batches: Sequence[PlannedMicroBatch]
) -> str | None:
    """Returns a warning for a run whose scheduler has groups of one rank, or None.

    Args:
        planner: planner that made the plans.
        micro_batches: planned micro-batches of the run's first global batch.
    """
    name, ranks = planner.options.scheduler, planner.ranks
    if name not in _WITHOUT_GROUPS or ranks == 1:
        return None
    if not planner.options.free_placement:
        return (
            f"--distca-scheduler {name} shards no document over a group with --distca-placement "
            "sequential, which cuts documents at the ends of ranks only: remove one of the two"
        )
    for micro_batch in micro_batches:
        for documents in micro_batch.documents:
            capacities = np.full(ranks, documents.lengths.sum() // ranks, dtype=np.int64)
            if group_size(planner.config, documents.lengths, capacities) > 1:
                return None
    return (
        f"--distca-scheduler {name} {_WITHOUT_GROUPS[name]}: its context-parallel groups have one "
        f"rank in the first global batch. To share documents among the {ranks} data-parallel ranks "
        "set --distca-context-parallel-size"
    )
