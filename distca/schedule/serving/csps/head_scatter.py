"""SP-NTP over ranks with whole weights: heads are scattered, and each rank has whole sequences.

An all-to-all brings the queries, keys and values of a group of heads to the group's server, and
another one its outputs, with their LSE, back to the tokens' owners (CSPS, Section 3.2.1). That is
one plan for each head group. All are one plan whose documents are what a group of heads sees of a
sequence: document `g * sequences + s` is sequence `s` to group `g`, and a rank's row of it is one
token's part of these heads. So nothing else is particular about such a plan.

The paper has as many groups as ranks. Where ranks don't divide the heads there are more, smaller
groups; where ranks outnumber the heads of keys and values, groups share one, which each is sent.
"""

from __future__ import annotations

import numpy as np

from distca.plan import Placement, Tasks
from distca.plan.span import Int64s


def head_groups(heads: int, kv_heads: int, ranks: int) -> int:
    """Finds how many equal groups of heads leave the busiest rank least, and as few as possible.

    Args:
        heads: query heads.
        kv_heads: heads of keys and values, which divide them.
        ranks: ranks that have the groups in turn; beyond `heads` some have none.
    """
    whole = [
        groups
        for groups in range(1, heads + 1)
        if not heads % groups and (not kv_heads % groups or not groups % kv_heads)
    ]
    return min(whole, key=lambda groups: (-(-groups // ranks) / groups, groups))


def scatter_heads(
    placement: Placement, lengths: Int64s, prefix: Int64s, groups: int
) -> tuple[Placement, Tasks]:
    """Makes the pieces and tasks of all head groups, each on one rank.

    A sequence that one rank has is computed there.

    Args:
        placement: all pieces of sequences, in the order of ranks' rows.
        lengths: tokens of each sequence, int64 `[sequences]`.
        prefix: cached tokens of each, likewise.
        groups: head groups.
    """
    sequences, ranks = len(lengths), placement.world_size
    first = np.repeat(np.arange(groups) * sequences, len(placement.rank))
    start, end, owner = (
        np.tile(column, groups) for column in (placement.start, placement.end, placement.rank)
    )
    pieces = Placement(np.tile(placement.document, groups) + first, start, end, owner, ranks)
    lowest, highest = np.full(sequences, ranks), np.full(sequences, -1)
    np.minimum.at(lowest, placement.document, placement.rank)
    np.maximum.at(highest, placement.document, placement.rank)
    server = np.repeat(np.arange(groups) * ranks // groups, sequences)
    server = np.where(np.tile(lowest == highest, groups), np.tile(lowest, groups), server)
    ends = np.tile(lengths, groups)
    document = np.arange(groups * sequences)
    tasks = Tasks(document, np.tile(prefix, groups), ends, np.zeros_like(ends), ends, server)
    return pieces, tasks
