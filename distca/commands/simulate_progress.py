"""Progress of `distca simulate`: which configuration runs, and how much time is left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from distca.progress import Progress, progress
from distca.simulate import DISTCA_SYSTEMS, Candidate
from distca.simulate.hybrid import HYBRID

_WEIGHTS = {**dict.fromkeys(DISTCA_SYSTEMS, 6.0), HYBRID: 2.0, "wlb-llm": 2.0}
"""Time of a system's search on large jobs, beside that of the others."""
_LEAST = 0.1
"""Share of the searches that must be done before the time that is left is shown."""
_USUALLY = "usually at most a minute"


@dataclass
class Searching:
    """Searches under way, which several threads tell of.

    Attributes:
        shown: where it is shown.
        systems: systems to compare.
        begun: systems whose search has begun.
        shares: share of each system's search that is done, as far as that is known.
        clock: seconds since some moment.
        start: moment at which the searches began, by the clock.
    """

    shown: Progress
    systems: Sequence[str]
    begun: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    def told(self, candidate: Candidate) -> None:
        """Counts an iteration, or a part of one, of a configuration."""
        with self._lock:
            if candidate.system not in self.begun:
                self.begun.append(candidate.system)
            of = f"{len(self.begun)} of {len(self.systems)} systems begun"
            self.shown.describe(f"{self._left()}, {of}, now {candidate.system}: {candidate}")
            self.shown.update()

    def reached(self, system: str, share: float) -> None:
        """Notes how much of a system's search is done."""
        with self._lock:
            self.shares[system] = share

    def _left(self) -> str:
        """Says how long the rest takes, if all systems go on as they have so far."""
        weights = {system: _WEIGHTS.get(system, 1.0) for system in self.systems}
        done = sum(weights[system] * share for system, share in self.shares.items())
        share = done / sum(weights.values())
        if not _LEAST <= share < 1:
            return _USUALLY
        left = (self.clock() - self.start) * (1 - share) / share
        return f"about {left:.0f} s left"


@contextlib.contextmanager
def simulating(systems: Sequence[str]) -> Iterator[Searching]:
    """Shows what is simulated, each second on a terminal, elsewhere every few seconds.

    Args:
        systems: systems to compare.
    """
    with progress("distca simulate", "iterations", doing=_USUALLY) as shown:
        yield Searching(shown, systems)
