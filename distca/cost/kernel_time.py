"""Models of kernel time: seconds for a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan.span import Floats, Int64s


class CostModel(Protocol):
    """A predictor of the forward kernel's seconds for tasks."""

    @property
    def description(self) -> str:
        """Source of the predictions, for reports."""
        ...

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """Predicts the seconds of each task, float64 `[tasks]`.

        Args:
            q_len: query rows, int64 `[tasks]`.
            kv_len: key rows, int64 `[tasks]`.
            pairs: visible (query, key) pairs, int64 `[tasks]`.
        """
        ...


@dataclass(frozen=True)
class AnalyticCost:
    """A model of pairs times operations at a constant rate, not measured.

    Balancing needs proportions alone, so the rate matters only where these seconds are compared
    with others.

    Attributes:
        flops_per_pair: operations of a visible pair, over all heads.
        flops_per_second: rate of the kernel.
    """

    flops_per_pair: float
    flops_per_second: float

    @staticmethod
    def of_shape(shape: AttentionShape, flops_per_second: float = 1e12) -> AnalyticCost:
        """Returns the model for the heads of a rank."""
        return AnalyticCost(shape.flops_per_pair, flops_per_second)

    @property
    def description(self) -> str:
        return "analytic model by pair counts, not measured"

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`."""
        return np.asarray(pairs, dtype=np.float64) * (self.flops_per_pair / self.flops_per_second)
