"""Context-parallel baselines: groups of ranks that share documents, each its own queries.

Ranks `[0, c)` are the first group, and so on; a group is `context_parallel_size` ranks, by default
the smallest divisor of the number of ranks that holds the longest document. Documents are laid one
after the other over the groups.

* **per-document-cp**: every document is cut into `2 c` chunks, of which rank `i` of the group owns
  the `i`th and the `i`th last, so that all its ranks have the same to do; keys are gathered from
  the others (Llama 3's and Megatron's context parallelism with an all-gather, sharded document by
  document). Only keys that are seen are counted and sent; an all-gather would send all of them.
* **ring-zigzag**: the group's whole sequence is cut so, whatever the documents in it, and each part
  of keys is attended as it comes round the ring: one task for each (queries, owner of keys), which
  merge by LSE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np

from distca.plan import Mask, Placement, Plan, Tasks, place_in_turn
from distca.plan.span import Int64s, expand_ranges
from distca.schedule.base import ScheduleConfig, plan_at_home


class _ContextParallel(ABC):
    """Documents one after the other over groups, whose pieces are sharded over their ranks."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def plan(self, lengths: Int64s, rooms: Int64s, mask: Mask) -> Plan:
        """See `Scheduler.plan`.

        Raises:
            ValueError: the ranks don't divide into groups.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        size = group_size(self._config, lengths, rooms)
        groups = place_in_turn(lengths, rooms.reshape(-1, size).sum(axis=1))
        return self.schedule(lengths, self._shard(groups, size), mask)

    @abstractmethod
    def _shard(self, groups: Placement, size: int) -> Placement:
        """The pieces of groups of so many ranks, over the ranks."""

    @abstractmethod
    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """See `Scheduler.schedule`."""


class PerDocumentContextParallel(_ContextParallel):
    """See the module."""

    def _shard(self, groups: Placement, size: int) -> Placement:
        return shard_documents(groups, size)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """See `Scheduler.schedule`."""
        return plan_at_home("per-document-cp", self._config, lengths, placement, mask)


class RingZigzag(_ContextParallel):
    """See the module. Under a window each rank's queries are one task, as the window hides most."""

    def _shard(self, groups: Placement, size: int) -> Placement:
        return shard_sequence(groups, size)

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """See `Scheduler.schedule`."""
        plan = plan_at_home("ring-zigzag", self._config, lengths, placement, mask)
        if mask.window_left is not None:
            return plan
        return replace(plan, tasks=_tasks_by_owner_of_keys(placement))


def group_size(config: ScheduleConfig, lengths: Int64s, rooms: Int64s) -> int:
    """Ranks in a context-parallel group.

    Raises:
        ValueError: the configured size does not divide the ranks.
    """
    ranks, size = len(rooms), config.context_parallel_size
    if size is not None:
        if ranks % size:
            raise ValueError(
                f"context-parallel size {size} does not divide {ranks} ranks: give a divisor"
            )
        return size
    longest, room = int(lengths.max(initial=1)), int(rooms.min())
    return next(
        c for c in range(1, ranks + 1) if ranks % c == 0 and (c * room >= longest or c == ranks)
    )


def shard_documents(groups: Placement, size: int) -> Placement:
    """Every piece that a group owns, head-tail over its ranks.

    Each rank of a group gets the same number of tokens of all its pieces together (the first ranks
    one more), whatever their lengths: rounding errors are carried from piece to piece.

    Args:
        groups: pieces of groups instead of ranks; the pieces of a group lie one after the other.
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
    return _touching_joined(pieces)


def shard_sequence(groups: Placement, size: int) -> Placement:
    """The sequence of each group's tokens, zigzag over its ranks: see `shard_documents`."""
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
    cuts = np.union1d(ends, chunk_ends[chunk_ends > 0])
    starts = np.concatenate([[0], cuts[:-1]])
    piece = np.searchsorted(ends, starts, side="right")
    offset = (start - (ends - lengths))[piece]
    rank = owner.ravel()[np.searchsorted(chunk_ends, starts, side="right")]
    pieces = Placement(
        document[piece], starts + offset, cuts + offset, rank, groups.world_size * size
    )
    return _touching_joined(pieces)


def _touching_joined(at: Placement) -> Placement:
    """Neighbouring pieces of a rank as one: the innermost head and tail touch."""
    order = np.lexsort((at.start, at.document, at.rank))
    document, start, end = at.document[order], at.start[order], at.end[order]
    rank = at.rank[order]
    opens = np.ones(len(rank), dtype=bool)
    opens[1:] = (rank[1:] != rank[:-1]) | (document[1:] != document[:-1]) | (start[1:] != end[:-1])
    last = np.append(np.flatnonzero(opens)[1:], len(rank)) - 1
    return Placement(document[opens], start[opens], end[last], rank[opens], at.world_size)


def _tasks_by_owner_of_keys(placement: Placement) -> Tasks:
    """Each piece's queries over each earlier piece's keys, and over its own."""
    order = np.lexsort((placement.start, placement.document))
    document, start = placement.document[order], placement.start[order]
    end, rank = placement.end[order], placement.rank[order]
    first = np.searchsorted(document, document)
    earlier = np.arange(len(document)) - first
    q = np.repeat(np.arange(len(document)), earlier + 1)
    kv = expand_ranges(first, earlier + 1)
    return Tasks(document[q], start[q], end[q], start[kv], end[kv], rank[q])
