"""The interface of a scheduler (documents in, a valid plan out), and functions that all share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.volume import AttentionShape
from distca.plan import BLOCK, Mask, Placement, Plan, Tasks
from distca.plan.span import Floats, Int64s

_RUNS_WELL = 0.5
"""Part of the highest rate that square tasks must reach at lengths which tasks may be cut to."""


class BufferBoundError(ValueError):
    """No plan for some documents keeps to `ScheduleConfig.max_buffer_bytes`.

    Attributes:
        least: most bytes that a server receives in the plan that comes closest.
    """

    least: int = 0


@dataclass(frozen=True)
class ScheduleConfig:
    """The configuration of a scheduler.

    Attributes:
        tolerance: part of the mean by which a server's load may exceed it.
        shape: attention heads of one tensor-parallel rank; they decide what rows cost in bytes.
        cost_model: predicts the seconds by which loads are measured; None: loads are visible pairs.
        block: tokens in a kernel's block; cuts fall on its multiples.
        links: links between the ranks.
        server_speeds: speed of each server relative to the others, by which loads are divided;
            None: all servers are equally fast.
        max_buffer_bytes: most bytes (queries, keys and values) that a server may receive for a
            layer's forward pass; None: no bound.
        context_parallel_size: ranks in a context-parallel group, for the baselines that have such
            groups; None: as few as the longest document needs.
        pools: server pools of this size that are planned one after the other; with very many
            `tiles` tries less for each.

    Raises:
        ValueError: a value is out of range.
    """

    tolerance: float = 0.1
    shape: AttentionShape = field(default_factory=lambda: AttentionShape(32, 8, 128))
    cost_model: CostModel | None = None
    block: int = BLOCK
    links: Links = field(default_factory=Links)
    server_speeds: tuple[float, ...] | None = None
    max_buffer_bytes: int | None = None
    context_parallel_size: int | None = None
    pools: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(
                f"tolerance {self.tolerance} is out of range: give a fraction of the mean load "
                "from 0 to below 1, such as 0.1"
            )
        if self.block < 1:
            raise ValueError(f"block {self.block} must be at least 1")
        if self.max_buffer_bytes is not None and self.max_buffer_bytes < 0:
            raise ValueError(f"the bound of {self.max_buffer_bytes} buffer bytes is negative")
        if self.context_parallel_size is not None and self.context_parallel_size < 1:
            raise ValueError(
                f"context-parallel size {self.context_parallel_size} must be at least 1"
            )
        for speed in self.server_speeds or ():
            if not (math.isfinite(speed) and speed > 0):
                raise ValueError(f"server speeds must be positive, not {speed}")

    def speeds_of(self, servers: int) -> Floats:
        """Returns the speed of each server, `[servers]`.

        Raises:
            ValueError: `server_speeds` has another number of servers.
        """
        if self.server_speeds is None:
            return np.ones(servers)
        if len(self.server_speeds) != servers:
            raise ValueError(
                f"{len(self.server_speeds)} server speeds are given for {servers} servers: give "
                "one for each"
            )
        return np.array(self.server_speeds, dtype=np.float64)

    def least_rows(self) -> int:
        """Returns the fewest rows, and keys, that a task may be cut to: kernels run badly below.

        Squares of the block's size and its doublings are compared: the smallest that reaches half
        of the highest rate among them counts. Without a cost model it is the block itself.
        """
        if self.cost_model is None:
            return self.block
        sides = self.block * 2 ** np.arange(6, dtype=np.int64)
        pairs = sides * sides
        seconds = np.maximum(self.cost_model.seconds(sides, sides, pairs), 1e-30)
        rates = pairs / seconds
        return int(sides[np.argmax(rates >= _RUNS_WELL * rates.max())])


class Scheduler(Protocol):
    """A pure function from documents and a configuration to a plan, the same on every rank."""

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        """Places documents as it finds best, and makes a valid plan for them.

        Args:
            lengths: tokens of each document, int64 `[documents]`.
            capacities: tokens that each rank owns, int64 `[ranks]`; their sum is the documents'.
            mask: attention mask of all documents.
        """
        ...

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Makes a valid plan for documents that are placed already.

        Args:
            lengths: tokens of each document, int64 `[documents]`.
            placement: ranks that own the tokens.
            mask: attention mask of all documents.
        """
        ...


def even_capacities(tokens: int, ranks: int, most: int | None = None) -> Int64s:
    """Divides tokens evenly over ranks, `[ranks]`; the first ranks get the remainder, one each.

    Raises:
        ValueError: there are no ranks, or a rank would get more than `most` tokens.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} servers cannot own tokens: give at least 1")
    if most is not None and tokens > ranks * most:
        raise ValueError(
            f"the documents have {tokens:,} tokens, but {ranks} servers with {most:,} tokens each "
            f"hold {ranks * most:,}: give more servers or fewer documents"
        )
    return np.full(ranks, tokens // ranks, dtype=np.int64) + (np.arange(ranks) < tokens % ranks)


def task_loads(
    tasks: Tasks, mask: Mask, cost_model: CostModel | None, pairs: Int64s | None = None
) -> Floats:
    """Returns the load of each task, `[tasks]`: predicted seconds, or pairs without a cost model.

    Args:
        tasks: tasks of any servers.
        mask: attention mask.
        cost_model: predicts seconds; None: loads are visible pairs.
        pairs: visible pairs of the tasks, int64 `[tasks]`; None: they are counted.
    """
    if pairs is None:
        pairs = tasks.pairs(mask)
    if cost_model is None:
        return pairs.astype(np.float64)
    return cost_model.seconds(tasks.q_end - tasks.q_start, tasks.kv_end - tasks.kv_start, pairs)


def document_loads(
    lengths: Int64s,
    mask: Mask,
    cost_model: CostModel | None,
    prefix: Int64s | None = None,
    query_shift: Int64s | None = None,
) -> Floats:
    """Returns the load of each document as one task, `[documents]`, as `task_loads` does.

    Args:
        lengths: tokens of each document, int64 `[documents]`.
        mask: attention mask of all documents.
        cost_model: predicts seconds; None: loads are visible pairs.
        prefix: first tokens of each document that have no queries, int64 `[documents]`, or None.
        query_shift: see `Plan.query_shift`.
    """
    zeros, numbers = np.zeros_like(lengths), np.arange(len(lengths))
    if prefix is None:
        return task_loads(Tasks(numbers, zeros, lengths, zeros, lengths, zeros), mask, cost_model)
    shift, first_keys = zeros if query_shift is None else query_shift, mask.first_key(prefix)
    tasks = Tasks(numbers, prefix + shift, lengths + shift, first_keys, lengths, zeros)
    return task_loads(tasks, mask, cost_model)


def shared_prefixes(lengths: Int64s, parents: Int64s, prefix: Int64s | None = None) -> Int64s:
    """Returns the tokens of each document that are its parent's, int64 `[documents]`.

    Args:
        lengths: tokens of each document with those of its parent, int64 `[documents]`.
        parents: an earlier document, whose first tokens are those of each document, or -1, int64
            `[documents]`.
        prefix: tokens that are the parent's, likewise; None: all that the parent has. Of a document
            without parent, first tokens that have no queries.

    Raises:
        ValueError: a parent is no earlier document, a document has no tokens of its own, or it
            branches off where its parent has no token of its own.
    """
    wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(len(parents))))
    if len(wrong):
        raise ValueError(
            f"document {wrong[0]} has the parent {parents[wrong[0]]}: give an earlier document, "
            "or -1 for none"
        )
    if prefix is None:
        prefix = np.where(parents < 0, 0, lengths[parents])
    most = np.where(parents < 0, lengths, lengths[parents])
    inherited = np.where(parents < 0, 0, prefix)
    least = np.where(parents < 0, 0, inherited[parents] + 1)
    wrong = np.flatnonzero(lengths <= prefix)
    if len(wrong):
        raise ValueError(
            f"document {wrong[0]} has {lengths[wrong[0]]} tokens, and "
            f"{prefix[wrong[0]]} of them are its parent's: give it at least one of its own"
        )
    wrong = np.flatnonzero((prefix < least) | (prefix > most))
    if len(wrong):
        raise ValueError(
            f"document {wrong[0]} has {prefix[wrong[0]]} tokens of its parent: give "
            f"{least[wrong[0]]} to {most[wrong[0]]}"
        )
    return prefix


def plan_at_home(
    name: str, config: ScheduleConfig, lengths: Int64s, placement: Placement, mask: Mask
) -> Plan:
    """Makes the plan in which every rank computes the queries that it owns, so that none moves.

    Args:
        name: name of the scheduler.
        config: configuration of the scheduler.
        lengths: tokens of each document, int64 `[documents]`.
        placement: ranks that own the tokens.
        mask: attention mask of all documents.
    """
    return Plan(
        np.asarray(lengths, dtype=np.int64),
        placement,
        tasks_at_home(placement, mask),
        mask,
        config.block,
        scheduler=name,
    )


def server_loads(tasks: Tasks, mask: Mask, world_size: int, cost_model: CostModel | None) -> Floats:
    """Returns the load of each server, `[world_size]`, in the unit of `task_loads`."""
    loads = task_loads(tasks, mask, cost_model)
    return np.bincount(tasks.server, weights=loads, minlength=world_size).astype(np.float64)


def relative_loads(loads: Floats, speeds: Floats) -> Floats:
    """Returns each server's time over the time if all were busy equally long; 1 without any load.

    With equal speeds this is a server's load over the mean load.
    """
    ideal = float(loads.sum()) / float(speeds.sum())
    return loads / speeds / ideal if ideal else np.ones(len(loads))


def level_load(load: float, speeds: Floats, busy: Floats | None = None) -> float:
    """Returns the time in which all servers are done if the load is shared as well as it can be.

    Args:
        load: load that can be shared, at speed 1.
        speeds: speed of each server, `[servers]`.
        busy: time in which each server does something else, `[servers]`, or None. A server
            that is busy for longer takes none of the load.
    """
    if busy is None:
        return load / float(speeds.sum())
    level, total, taken = 0.0, load, 0.0
    for server in np.argsort(busy, kind="stable").tolist():
        if taken and total / taken <= busy[server]:
            break
        total += float(speeds[server] * busy[server])
        taken += float(speeds[server])
        level = total / taken
    return level


def tasks_at_home(
    placement: Placement, mask: Mask, lengths: Int64s | None = None, shift: Int64s | None = None
) -> Tasks:
    """Makes one task of each run of a rank's tokens, on this rank, over all keys that they see.

    Pieces that follow each other are one run: apart, their tasks would each have a copy of the keys
    that both see.

    Args:
        placement: ranks that own the tokens.
        mask: attention mask.
        lengths: tokens of each document; needed with `shift` alone.
        shift: see `Plan.query_shift`.
    """
    placement = placement.joined()
    if mask.attention_chunk is not None:
        placement = placement.cut_every(mask.attention_chunk)
    document, start, end = placement.document, placement.start, placement.end
    moved, keys = np.zeros_like(start), end
    if shift is not None and lengths is not None:
        moved = shift[document]
        keys = np.where(moved > 0, lengths[document], end)
    return Tasks(
        document=document,
        q_start=start + moved,
        q_end=end + moved,
        kv_start=mask.first_key(start),
        kv_end=keys,
        server=placement.rank,
    )
