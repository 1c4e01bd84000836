"""Load awareness of prefills: the improvement rate that suits how many requests arrive."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WINDOW = 30.0
"""Seconds whose arrivals tell the load."""

IMPROVEMENT_RATES = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)
"""Rates to try in simulation, over the range that the paper tries."""


@dataclass(frozen=True)
class ImprovementRates:
    """The improvement rate to use by arrivals a second, as simulations found them.

    Attributes:
        by_arrivals: improvement rate by arrivals a second, ascending.

    Raises:
        ValueError: there is none, or one is out of range.
    """

    by_arrivals: Mapping[float, float]

    def __post_init__(self) -> None:
        if not self.by_arrivals:
            raise ValueError("no improvement rate is given: give one for at least one arrival rate")
        for arrivals, rate in self.by_arrivals.items():
            if not (0 <= arrivals < math.inf and 0 <= rate < 1):
                raise ValueError(
                    f"improvement rate {rate} at {arrivals} arrivals a second: rates must be from "
                    "0 to below 1, arrivals not negative"
                )
        object.__setattr__(self, "by_arrivals", dict(sorted(self.by_arrivals.items())))

    def at(self, arrivals: float) -> float:
        """The rate that is recorded for the nearest arrivals a second; of two the lower one's."""
        return self.by_arrivals[min(self.by_arrivals, key=lambda known: abs(known - arrivals))]

    def save(self, path: Path) -> None:
        """Writes the rates as JSON: an object of improvement rates by arrivals a second."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({str(k): v for k, v in self.by_arrivals.items()}, indent=1))

    @classmethod
    def load(cls, path: Path) -> ImprovementRates:
        """Reads what `save` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            saved: Any = json.loads(path.read_text())
            return cls({float(arrivals): float(rate) for arrivals, rate in saved.items()})
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no improvement rates: an object of rates by arrivals a second, such "
                'as {"0.5": 0.05, "4": 0.45}'
            ) from error


class Load:
    """Arrivals of the last seconds, and the improvement rate for them.

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

    def improvement_rate(self, now: float) -> float:
        """The improvement rate to plan with now."""
        return self.rates.at(self.per_second(now))

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0] <= now - self._window:
            self._arrivals.popleft()


def least_by_rate(ttft: Iterable[tuple[float, float, float]]) -> ImprovementRates:
    """Takes for each arrival rate the improvement rate of least time to the first token.

    Args:
        ttft: arrivals a second, improvement rate, and seconds to the first token with it.
    """
    best: dict[float, tuple[float, float]] = {}
    for arrivals, rate, seconds in ttft:
        if arrivals not in best or seconds < best[arrivals][0]:
            best[arrivals] = (seconds, rate)
    return ImprovementRates({arrivals: rate for arrivals, (_, rate) in best.items()})
