"""Losses of runs beside each other, in the iterations that all of them logged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_ROUNDING = 1e-4
"""Share of a loss up to which runs differ by rounding, which training amplifies."""
_CUT = (
    "Without --distca documents end where a rank's tokens end, and with it they stay whole: "
    "losses differ where documents cross these ends."
)


@dataclass(frozen=True)
class LossComparison:
    """Losses of runs in the iterations that all of them logged.

    Attributes:
        first, last: the first and the last of these iterations.
        count: number of these iterations.
        last_losses: each run's loss of the last one.
        mean_losses: each run's mean over all of them.
        largest_difference: largest difference between two runs in one iteration; 0: there is one
            run.
        at_iteration: the iteration of the largest difference.
        why: a sentence on why they differ; "": by no more than rounding, or nothing is known.
    """

    first: int
    last: int
    count: int
    last_losses: Mapping[str, float]
    mean_losses: Mapping[str, float]
    largest_difference: float
    at_iteration: int
    why: str

    @staticmethod
    def of(
        losses: Mapping[str, Mapping[int, float]], planned: Collection[str]
    ) -> LossComparison | None:
        """Compares runs.

        Args:
            losses: of each run the loss by iteration; runs without any are left out.
            planned: runs that had plans, as those with `--distca`.

        Returns:
            The comparison; None: no iteration is of all runs.
        """
        known = {name: each for name, each in losses.items() if each}
        steps = sorted(set.intersection(*map(set, known.values()))) if known else []
        if not steps:
            return None

        def difference(step: int) -> float:
            values = [each[step] for each in known.values()]
            # A loss that is not finite differs most.
            return max(values) - min(values) if all(map(math.isfinite, values)) else math.inf

        at = max(steps, key=difference)
        means = {
            name: statistics.fmean(each[step] for step in steps) for name, each in known.items()
        }
        kinds = {name in planned for name in known}
        differs = difference(at) > _ROUNDING * max(abs(each[at]) for each in known.values())
        return LossComparison(
            steps[0],
            steps[-1],
            len(steps),
            {name: each[steps[-1]] for name, each in known.items()},
            means,
            difference(at),
            at,
            _CUT if differs and len(kinds) > 1 and math.isfinite(difference(at)) else "",
        )

    def rows(self) -> dict[str, Mapping[str, float]]:
        """Returns the rows of a table, by their titles."""
        return {
            f"loss of iteration {self.last}": self.last_losses,
            f"mean loss, iterations {self.first} to {self.last}": self.mean_losses,
        }

    def sentence(self) -> str:
        """Says how much the runs differ and why; "": there is one run."""
        if len(self.last_losses) < 2:
            return ""
        said = (
            f"Losses differ by {self.largest_difference:.2g} at most, in iteration "
            f"{self.at_iteration}."
        )
        return f"{said} {self.why}".rstrip()

    def figures(self) -> dict[str, Any]:
        """Returns all figures as JSON values; infinity, which JSON lacks, is null."""
        found = asdict(self)
        if not math.isfinite(self.largest_difference):
            found["largest_difference"] = None
        return found
