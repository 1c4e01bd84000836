"""Sizes of the buffers for all decode steps of a number of sequences, wherever their keys lie."""

from __future__ import annotations

import numpy as np

from distca.cost.memory import (
    INDEX_BYTES,
    MOST_INDICES,
    CoreAttentionMemory,
    aligned,
    merge_bytes,
)
from distca.cost.volume import AttentionShape


def decode_memory(sequences: int, world_size: int, shape: AttentionShape) -> CoreAttentionMemory:
    """Sizes of the buffers for one layer's core attention of one query of each sequence.

    They suffice for every decode step of that many sequences, so they are worked out once: one rank
    may own all queries, and send them to all others; or serve all.

    Args:
        sequences: most sequences that a step feeds.
        world_size: ranks.
        shape: heads of a layer on each rank.
    """
    q_row, result_row = shape.q_row_bytes, shape.result_row_bytes
    sent = sequences * (world_size - 1)
    # Partial outputs of the kernels, those that come back, and the merged ones.
    parts = 2 * sequences + sent
    members = np.array(sequences * world_size)
    # Of the queries that a kernel takes, at most half are gathered apart, and overwrite others. All
    # have one more index, for kernels that take both memories at once.
    taken = aligned(sequences * q_row) + aligned(sequences // 2 * q_row)
    indices = 3 * sent + 2 * sequences + 4 * sequences + parts + 3 * int(members) + sequences
    return CoreAttentionMemory(
        dispatch_send=sent * q_row,
        dispatch_receive=sequences * q_row,
        combine_send=sequences * result_row,
        combine_receive=sent * result_row,
        slot=int(aligned(sequences * q_row) + aligned(parts * result_row)),
        scratch=int(max(taken, merge_bytes(members, shape))),
        indices=int(aligned((indices + MOST_INDICES) * INDEX_BYTES)),
    )
