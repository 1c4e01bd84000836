"""What a scheduler is: documents and their placement in, a valid plan out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from distca.cost.model import CostModel
from distca.cost.volume import AttentionShape
from distca.plan import BLOCK, Mask, Placement, Plan
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
