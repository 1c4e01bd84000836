"""Seconds of partitions on the ranks of a model, which feed a prompt in each of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.inference.rank_processes import RankProcesses
from distca.plan.span import Floats, Int64s
from distca.schedule.serving.partitions import Parts


@dataclass(frozen=True)
class MeasuredChain:
    """A function from partitions to seconds, which runs each of them once.

    Attributes:
        ranks: ranks that run.
        by: "cpu" for the most CPU seconds of a process, "wall" for those to the first token.
        rounds: prefills of a partition, whose median counts.
        trials: seconds of the partitions that were run, which grow.
        noted: function that is called after each partition.
    """

    ranks: RankProcesses
    by: Literal["cpu", "wall"]
    rounds: int
    trials: MutableMapping[Parts, float]
    noted: Callable[[], object]

    def __call__(self, partitions: Int64s) -> Floats:
        """Tells the seconds of partitions, int64 `[partitions, ranks]`."""
        return np.array([self._seconds(tuple(map(int, parts))) for parts in partitions])

    def _seconds(self, parts: Parts) -> float:
        if parts not in self.trials:
            which = ("cpu", "wall").index(self.by)
            times = [self.ranks.time_prefill(parts)[which] for _ in range(self.rounds)]
            self.trials[parts] = statistics.median(times)
            self.noted()
        return self.trials[parts]
