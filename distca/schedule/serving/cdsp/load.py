"""Load awareness of prefills: how far groups may grow, by how many requests arrive.

The paper has an improvement rate by load. Here a bound on the sizes of groups, the candidates of
its Algorithm 1, may go with it: under load a group as large as a node waits for the last of its
ranks, and a rate that keeps long prompts from that leaves others on too few.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distca.json_files import read_text
from distca.whole_file import write_text

WINDOW = 30.0
"""Seconds whose arrivals tell the load."""

IMPROVEMENT_RATES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)
"""Rates to try in simulation, over the range that the paper tries."""


Growth = float | tuple[float, int]
"""An improvement rate; or one and the most ranks of a group."""


@dataclass(frozen=True)
class ImprovementRates:
    """The improvement rate to use by arrivals a second, as simulations found them.

    Attributes:
        by_arrivals: improvement rate, alone or with the most ranks of a group, by arrivals a
            second, ascending.

    Raises:
        ValueError: there is none, or one is out of range.
    """

    by_arrivals: Mapping[float, Growth]

    def __post_init__(self) -> None:
        if not self.by_arrivals:
            raise ValueError("no improvement rate is given: give one for at least one arrival rate")
        for arrivals, growth in self.by_arrivals.items():
            rate, ranks = _parts(growth)
            if not (0 <= arrivals < math.inf and 0 <= rate < 1 <= ranks):
                raise ValueError(
                    f"improvement rate {growth} at {arrivals} arrivals a second: rates must be "
                    "from 0 to below 1, ranks at least 1, arrivals not negative"
                )
        object.__setattr__(self, "by_arrivals", dict(sorted(self.by_arrivals.items())))

    def at(self, arrivals: float) -> tuple[float, float]:
        """Returns the rate, and the most ranks of a group, that are recorded for the nearest
        arrivals a second; of two the lower one's."""
        nearest = min(self.by_arrivals, key=lambda known: abs(known - arrivals))
        return _parts(self.by_arrivals[nearest])

    def save(self, path: Path) -> None:
        """Writes the rates as JSON: an object of them by arrivals a second."""
        write_text(path, json.dumps({str(k): v for k, v in self.by_arrivals.items()}, indent=1))

    @classmethod
    def load(cls, path: Path) -> ImprovementRates:
        """Reads what `save` wrote.

        Raises:
            ValueError: it is something else.
        """
        text = read_text(path, "give a JSON object of improvement rates by arrivals a second")
        try:
            saved = json.loads(text)
            return cls({float(arrivals): _growth(given) for arrivals, given in saved.items()})
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no improvement rates: an object of rates by arrivals a second, such "
                'as {"0.5": 0.05, "4": 0.45}, or {"4": [0.45, 8]} for groups of at most 8 ranks'
            ) from error


def _growth(given: float | list[float]) -> Growth:
    return (float(given[0]), int(given[1])) if isinstance(given, list) else float(given)


def _parts(growth: Growth) -> tuple[float, float]:
    """Returns the improvement rate, and the most ranks of a group."""
    return growth if isinstance(growth, tuple) else (growth, math.inf)


class Load:
    """Arrivals of the last seconds, and how far groups may grow at such a load.

    Args:
        rates: improvement rates to choose from; they may be set anew at any time.
        window: seconds whose arrivals count.
    """

    def __init__(self, rates: ImprovementRates, window: float = WINDOW) -> None:
        self.rates = rates
        self._window = window
        self._arrivals: deque[float] = deque()

    def arrived(self, now: float) -> None:
        """Notes an arrival; times must not go back."""
        self._arrivals.append(now)
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Arrivals a second of the window that ends now."""
        self._forget(now)
        return len(self._arrivals) / self._window

    def growth(self, now: float) -> tuple[float, float]:
        """Returns the improvement rate and the most ranks of a group to plan with now."""
        return self.rates.at(self.per_second(now))

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0] <= now - self._window:
            self._arrivals.popleft()


def least_by_rate(ttft: Iterable[tuple[float, Growth, float]]) -> ImprovementRates:
    """Takes for each arrival rate the improvement rate of least time to the first token.

    Args:
        ttft: arrivals a second, improvement rate, alone or with the most ranks of a group, and
            seconds to the first token with it; of equal ones the first is taken.
    """
    best: dict[float, tuple[float, Growth]] = {}
    for arrivals, growth, seconds in ttft:
        if arrivals not in best or seconds < best[arrivals][0]:
            best[arrivals] = (seconds, growth)
    return ImprovementRates({arrivals: growth for arrivals, (_, growth) in best.items()})
