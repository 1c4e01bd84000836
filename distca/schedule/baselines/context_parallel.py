"""Context-parallel baselines: groups of ranks that share documents, each its own queries.

Ranks `[0, c)` are the first group, and so on; a group has `context_parallel_size` ranks, by default
the smallest divisor of the number of ranks with which a group holds the longest document. Documents
are placed in turn on the groups.

* **per-document-cp**: every document is cut into `2 c` chunks; rank `i` of the group owns
  the `i`th and the `i`th last, so that all ranks have equal work; keys are gathered from the others
  (context parallelism with an all-gather, as in Llama 3 and Megatron, sharded document by
  document). Only keys that queries see are counted and sent; an all-gather would send all of them.
* **ring-zigzag**: the group's whole sequence is cut in this way, across its documents, and queries
  attend to each rank's keys as they pass round the ring: one task for each pair of queries and
  owner of keys, merged by LSE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from distca.plan import Mask, Placement, Plan, Tasks, place_in_turn
from distca.plan.span import Int64s, distinct, expand_ranges
from distca.schedule.base import ScheduleConfig, plan_at_home


class _ContextParallel(ABC):
    """Context parallelism: documents placed in turn on groups, and sharded over a group's ranks."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.plan` says.

        Raises:
            ValueError: the ranks don't divide into groups.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        size = group_size(self._config, lengths, capacities)
        groups = place_in_turn(lengths, capacities.reshape(-1, size).sum(axis=1))
        return self.schedule(lengths, self._shard(groups, size), mask)

    @abstractmethod
    def _shard(self, groups: Placement, size: int) -> Placement:
        """Shards the pieces of groups of `size` ranks over these ranks."""

    @abstractmethod
    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.schedule` says."""


class PerDocumentContextParallel(_ContextParallel):
    """Context parallelism that shards every document, `per-document-cp` of the module."""

    def _shard(self, groups: Placement, size: int) -> Placement:
        return shard_documents(groups, size)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.schedule` says."""
        return plan_at_home("per-document-cp", self._config, lengths, placement, mask)


class RingZigzag(_ContextParallel):
    """Ring attention over a group's whole sequence, `ring-zigzag` of the module.

    Under a window each piece is one task, as the window hides most keys.
    """

    def _shard(self, groups: Placement, size: int) -> Placement:
        return shard_sequence(groups, size)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.schedule` says."""
        plan = plan_at_home("ring-zigzag", self._config, lengths, placement, mask)
        if mask.window_left is not None:
            return plan
        return replace(plan, tasks=_tasks_by_owner_of_keys(placement))


def group_size(config: ScheduleConfig, lengths: Int64s, capacities: Int64s) -> int:
    """Returns the number of ranks in a context-parallel group.

    Raises:
        ValueError: the configured size does not divide the ranks.
    """
    ranks, size = len(capacities), config.context_parallel_size
    if size is not None:
        if ranks % size:
            raise ValueError(
                f"context-parallel size {size} does not divide {ranks} ranks: give a divisor"
            )
        return size
    longest, room = int(lengths.max(initial=1)), int(capacities.min())
    return next(
        c for c in range(1, ranks + 1) if ranks % c == 0 and (c * room >= longest or c == ranks)
    )


def shard_documents(groups: Placement, size: int) -> Placement:
    """Shards every piece that a group owns over the group's ranks, head and tail for each.

    All ranks of a group get the same number of tokens in total (the first ranks one more), whatever
    the lengths of the pieces: rounding errors are carried from piece to piece.

    Args:
        groups: placement on groups instead of ranks, in which the group is the `rank`.
        size: ranks in a group.
    """
    order = np.argsort(groups.rank, kind="stable")
    document, group = groups.document[order], groups.rank[order]
    start, lengths = groups.start[order], (groups.end - groups.start)[order]
    until = np.cumsum(lengths)
    opens = np.diff(group, prepend=-1) != 0
    until -= np.repeat(
        (until - lengths)[opens], np.diff(np.append(np.flatnonzero(opens), len(group)))
    )
    members = np.arange(size - 1, -1, -1)
    share = (until[:, None] + members) // size - ((until - lengths)[:, None] + members) // size
    heads = share // 2
    chunks = np.concatenate([heads, (share - heads)[:, ::-1]], axis=1)
    rank = np.concatenate([np.arange(size), np.arange(size)[::-1]]) + group[:, None] * size
    ends = np.cumsum(chunks, axis=1) + start[:, None]
    filled = chunks > 0
    pieces = Placement(
        np.repeat(document, filled.sum(axis=1)),
        (ends - chunks)[filled],
        ends[filled],
        rank[filled],
        groups.world_size * size,
    )
    return pieces.joined()


def shard_sequence(groups: Placement, size: int) -> Placement:
    """Shards the sequence of each group's tokens in zigzag over its ranks."""
    order = np.argsort(groups.rank, kind="stable")
    document, start = groups.document[order], groups.start[order]
    lengths = (groups.end - groups.start)[order]
    tokens = groups.tokens_per_rank()
    members = np.arange(size)
    share = tokens[:, None] // size + (members < (tokens % size)[:, None])
    heads = share // 2
    chunks = np.concatenate([heads, (share - heads)[:, ::-1]], axis=1).ravel()
    owner = np.concatenate([members, members[::-1]]) + np.arange(len(tokens))[:, None] * size
    chunk_ends, ends = np.cumsum(chunks), np.cumsum(lengths)
    cuts = distinct(np.concatenate([ends, chunk_ends[chunk_ends > 0]]))
    starts = np.concatenate([[0], cuts[:-1]])
    piece = np.searchsorted(ends, starts, side="right")
    offset = (start - (ends - lengths))[piece]
    rank = owner.ravel()[np.searchsorted(chunk_ends, starts, side="right")]
    pieces = Placement(
        document[piece], starts + offset, cuts + offset, rank, groups.world_size * size
    )
    return pieces.joined()


def _tasks_by_owner_of_keys(placement: Placement) -> Tasks:
    """Makes tasks of each piece's queries over each earlier piece's keys and over its own."""
    order = np.lexsort((placement.start, placement.document))
    document, start = placement.document[order], placement.start[order]
    end, rank = placement.end[order], placement.rank[order]
    first = np.searchsorted(document, document)
    earlier = np.arange(len(document)) - first
    q = np.repeat(np.arange(len(document)), earlier + 1)
    kv = expand_ranges(first, earlier + 1)
    return Tasks(document[q], start[q], end[q], start[kv], end[kv], rank[q])
