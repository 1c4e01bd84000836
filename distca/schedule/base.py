"""What a scheduler is: documents in, a valid plan out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from distca.cost.link import Links
from distca.cost.model import CostModel
from distca.cost.volume import AttentionShape
from distca.plan import BLOCK, Mask, Placement, Plan, Tasks
from distca.plan.span import Floats, Int64s

_RUNS_WELL = 0.5
"""A kernel runs well from the length at which squares reach this part of the highest rate."""


@dataclass(frozen=True)
class ScheduleConfig:
    """What schedulers are told besides the documents.

    Attributes:
        tolerance: how far a server's load may be above the mean, as a fraction of it.
        shape: the attention heads of one tensor-parallel rank, to weigh bytes by.
        cost_model: judges loads by predicted seconds; None: by visible pairs.
        block: cuts fall on its multiples.
        links: what connects the ranks.
        server_speeds: the speed of each server beside the others; None: all alike. Loads are
            divided by it.
        max_buffer_bytes: a server never receives more to compute a layer forward (queries, keys and
            values); None: no bound.
        context_parallel_size: ranks that share documents, for the baselines that have such groups;
            None: as few as the longest document needs.

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
        """The speed of each server, `[servers]`.

        Raises:
            ValueError: speeds are given for another number of servers.
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
        """Rows, or keys, below which the kernel runs badly: nothing is cut into less.

        The first of the block's doublings at which a square task reaches half of the highest rate
        of these; the block itself without measured times.
        """
        if self.cost_model is None:
            return self.block
        sides = self.block * 2 ** np.arange(6, dtype=np.int64)
        pairs = sides * sides
        seconds = np.maximum(self.cost_model.seconds(sides, sides, pairs), 1e-30)
        rates = pairs / seconds
        return int(sides[np.argmax(rates >= _RUNS_WELL * rates.max())])


class Scheduler(Protocol):
    """Makes plans: a pure function of its arguments and its configuration, alike on every rank."""

    def plan(self, lengths: Int64s, rooms: Int64s, mask: Mask) -> Plan:
        """A valid plan for documents that are placed as the scheduler likes best.

        Args:
            lengths: tokens of each document, int64 `[documents]`.
            rooms: how many tokens each rank owns, int64 `[ranks]`; they sum up to the documents'.
            mask: what a query sees.
        """
        ...

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """A valid plan for documents that are placed already.

        Args:
            lengths: tokens of each document, int64 `[documents]`.
            placement: who owns which tokens.
            mask: what a query sees.
        """
        ...


def even_rooms(tokens: int, ranks: int, most: int | None = None) -> Int64s:
    """Equal shares of tokens, the first ranks' one larger where they don't divide, `[ranks]`.

    Raises:
        ValueError: there are no ranks, or a share would be larger than `most`.
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
    """The load of each task, `[tasks]`: predicted seconds, or pairs without a cost model.

    Args:
        tasks: whose loads.
        mask: what a query sees.
        cost_model: predicts seconds.
        pairs: of the tasks, int64 `[tasks]`, where they are known.
    """
    if pairs is None:
        pairs = tasks.pairs(mask)
    if cost_model is None:
        return pairs.astype(np.float64)
    return cost_model.seconds(tasks.q_end - tasks.q_start, tasks.kv_end - tasks.kv_start, pairs)


def document_loads(lengths: Int64s, mask: Mask, cost_model: CostModel | None) -> Floats:
    """The load of each document as one task, `[documents]`: see `task_loads`."""
    zeros, numbers = np.zeros_like(lengths), np.arange(len(lengths))
    return task_loads(Tasks(numbers, zeros, lengths, zeros, lengths, zeros), mask, cost_model)


def plan_at_home(
    name: str, config: ScheduleConfig, lengths: Int64s, placement: Placement, mask: Mask
) -> Plan:
    """The plan in which every rank computes the queries that it owns: no query moves.

    Args:
        name: of the scheduler.
        config: its configuration.
        lengths: tokens of each document, int64 `[documents]`.
        placement: who owns which tokens.
        mask: what a query sees.
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
    """The load of each server, `[world_size]`: see `task_loads`."""
    loads = task_loads(tasks, mask, cost_model)
    return np.bincount(tasks.server, weights=loads, minlength=world_size).astype(np.float64)


def relative_loads(loads: Floats, speeds: Floats) -> Floats:
    """Each server's time over what it would be if all were busy for as long; 1 without any load.

    With equal speeds this is the load over the mean load.
    """
    ideal = float(loads.sum()) / float(speeds.sum())
    return loads / speeds / ideal if ideal else np.ones(len(loads))


def tasks_at_home(placement: Placement, mask: Mask) -> Tasks:
    """Each placed piece as one task of its owner, over all the keys that it sees."""
    at = placement
    return Tasks(
        document=at.document,
        q_start=at.start,
        q_end=at.end,
        kv_start=mask.first_key(at.start),
        kv_end=at.end,
        server=at.rank,
    )
