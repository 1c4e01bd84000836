"""What a scheduler is: documents and their placement in, a valid plan out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distca.cost.model import CostModel
from distca.cost.volume import AttentionShape
from distca.plan import BLOCK, Mask, Placement, Plan, Tasks
from distca.plan.span import Int64s


@dataclass(frozen=True)
class ScheduleConfig:
    """What schedulers are told besides the documents.

    Attributes:
        tolerance: how far a server's load may be from the mean, as a fraction of it.
        shape: the attention heads of one tensor-parallel rank, to weigh bytes by.
        cost_model: judges loads by predicted seconds; None: by visible pairs.
        block: cuts fall on its multiples.

    Raises:
        ValueError: a value is out of range.
    """

    tolerance: float = 0.1
    shape: AttentionShape = field(default_factory=lambda: AttentionShape(32, 8, 128))
    cost_model: CostModel | None = None
    block: int = BLOCK

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError(
                f"tolerance {self.tolerance} is out of range: give a fraction of the mean load "
                "from 0 to below 1, such as 0.1"
            )
        if self.block < 1:
            raise ValueError(f"block {self.block} must be at least 1")


class Scheduler(Protocol):
    """Makes plans: a pure function of its arguments and its configuration, alike on every rank."""

    def schedule(self, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """A valid plan for the documents.

        Args:
            lengths: tokens of each document, int64 `[documents]`.
            placement: who owns which tokens.
            mask: what a query sees.
        """
        ...


def server_loads(
    tasks: Tasks, mask: Mask, world_size: int, cost_model: CostModel | None
) -> NDArray[np.float64]:
    """The load of each server, `[world_size]`: predicted seconds, or pairs without a cost model."""
    pairs = tasks.pairs(mask)
    if cost_model is None:
        load = pairs.astype(np.float64)
    else:
        q_len, kv_len = tasks.q_end - tasks.q_start, tasks.kv_end - tasks.kv_start
        load = cost_model.seconds(q_len, kv_len, pairs)
    loads = np.zeros(world_size)
    np.add.at(loads, tasks.server, load)
    return loads


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
