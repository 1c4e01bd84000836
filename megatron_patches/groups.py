"""A warning where a baseline is to shard documents over groups of ranks, but has none to do so."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from distca.schedule.context_parallel import group_size
from megatron_patches.planned_batches import NanoBatches, PlannedBatches

_WITHOUT_GROUPS = {
    "per-document-cp": "is the same as packed",
    "ring-zigzag": "has the placement of packed",
    "wlb-llm": "packs whole documents, and shards none, which is packed with another packing",
}
"""What baselines with context-parallel groups are on groups of one rank."""


def warning_of_groups_of_one(
    args: Namespace, batches: PlannedBatches, micro_batches: Sequence[NanoBatches]
) -> str | None:
    """What to say of a run whose scheduler has groups of one rank, or None.

    Args:
        args: Megatron-LM's arguments.
        batches: made the micro-batches.
        micro_batches: of the run's first global batch.
    """
    name, ranks = args.distca_scheduler, batches.layout.data_parallel_size
    if name not in _WITHOUT_GROUPS or ranks == 1:
        return None
    if not batches.free_placement:
        return (
            f"--distca-scheduler {name} shards no document over a group with --distca-placement "
            "sequential, which cuts documents at the ends of ranks only: remove one of the two"
        )
    for micro_batch in micro_batches:
        for documents in micro_batch.documents:
            rooms = np.full(ranks, documents.lengths.sum() // ranks, dtype=np.int64)
            if group_size(batches.schedule_config, documents.lengths, rooms) > 1:
                return None
    return (
        f"--distca-scheduler {name} {_WITHOUT_GROUPS[name]}: its context-parallel groups have one "
        f"rank in the first global batch. To share documents among the {ranks} data-parallel ranks "
        "set --distca-context-parallel-size"
    )
