"""How much faster a system is than another on the same batches, with the range of that figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of Student's distribution, of 1, 2, ... degrees of freedom."""
SIMULATORS_ERROR = 0.018
"""Median error of simulated steps without pipeline stages, against measured ones
(benchmarks/results/simulator.md). With two stages it is less."""
POOLS_ERROR = 0.038
"""Median error of simulated steps on four processes: one group, server pools, and shared heads
(benchmarks/results/pools.md)."""
_SEQUENCES, _FEWEST, _MOST = 384, 4, 24
"""Sequences to simulate, and the fewest and most batches."""


@dataclass(frozen=True)
class SpeedUp:
    """Seconds of one system over those of another, both summed over the same batches.

    The range is a 95% confidence interval: of a job with many such batches the figure lies in it in
    19 of 20 cases. Single batches may lie outside.

    Attributes:
        mean: ratio in all batches.
        low, high: ends of the range; NaN of one batch, which tells none.
        batches: number of batches.
    """

    mean: float
    low: float
    high: float
    batches: int

    @staticmethod
    def of(ours: Sequence[float], others: Sequence[float]) -> SpeedUp:
        """Compares the seconds of batches.

        Args:
            ours: seconds of the system that is judged.
            others: seconds of the other system, of the same batches.
        """
        assert len(ours) == len(others) > 0
        mine, theirs = np.asarray(ours, dtype=np.float64), np.asarray(others, dtype=np.float64)
        count, mean = len(mine), float(theirs.sum() / mine.sum())
        if count == 1:
            return SpeedUp(mean, math.nan, math.nan, 1)
        # The error of a ratio of sums, to first order.
        spread = math.sqrt(float(((theirs - mean * mine) ** 2).sum()) / (count - 1))
        error = _quantile(count - 1) * spread / math.sqrt(count) / float(mine.mean())
        # Few batches that differ much tell nothing, and no ratio is below 0.
        return SpeedUp(mean, max(mean - error, 0.0), mean + error, count)

    @property
    def faster(self) -> bool | None:
        """Whether the system is faster; None: the range leaves it open."""
        if self.low > 1:
            return True
        return False if self.high < 1 else None

    def inverse(self) -> SpeedUp:
        """Returns how much faster the other system is."""
        most = 1 / self.low if self.low else math.inf
        return SpeedUp(1 / self.mean, 1 / self.high, most, self.batches)

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def _quantile(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's distribution."""
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    # Within 0.1% from there on.
    return 1.96 + 2.39 / freedom + 2.9 / freedom**2


def enough_batches(sequences: int) -> int:
    """Returns how many batches of that many sequences tell a ratio within about 1%.

    Large batches differ less from each other, so fewer of them are enough. Four are the fewest, for
    the time that they take: their range may be wider.
    """
    return min(max(-(-_SEQUENCES // sequences), _FEWEST), _MOST)
