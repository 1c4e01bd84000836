"""Progress of `distca simulate`: which configuration runs, and how much time is left."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from distca.commands.verdict import TITLES
from distca.progress import OVERDUE, Progress, progress
from distca.simulate import DISTCA_SYSTEMS, Candidate
from distca.simulate.hybrid import HYBRID
from distca.simulate.trials import Trials

_WEIGHTS = {**dict.fromkeys(DISTCA_SYSTEMS, 6.0), HYBRID: 2.0, "wlb-llm": 2.0}
"""Time of a system's search on large jobs, beside that of the others."""
_LEAST = 0.1
"""Share of the searches that must be done before the time that is left is shown."""
_USUALLY, _UNUSUAL = "usually at most a minute", "longer than usual"
_USUAL_SECONDS = 60.0


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
    # Moment at which the searches end, as it was estimated last.
    _end: float | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()

    def told(self, candidate: Candidate) -> None:
        """Counts an iteration, or a part of one, of a configuration."""
        with self._lock:
            if candidate.system not in self.begun:
                self.begun.append(candidate.system)
            of = f"{len(self.begun)} of {len(self.systems)} systems begun"
            now = f"{of}, now {TITLES[candidate.system]}: {candidate}"
            self.shown.describe(lambda: f"{self._left()}, {now}")
            self.shown.update()

    def reached(self, system: str, share: float) -> None:
        """Notes how much of a system's search is done."""
        with self._lock:
            self.shares[system] = share
            weights = {each: _WEIGHTS.get(each, 1.0) for each in self.systems}
            done = sum(weights[each] * part for each, part in self.shares.items())
            whole = done / sum(weights.values())
            if whole >= _LEAST:
                # If all systems go on as they have so far. Until more is done the moment stays, so
                # that the time that is left does not grow.
                self._end = self.start + (self.clock() - self.start) / whole

    def _left(self) -> str:
        """Says how long the rest takes."""
        now = self.clock()
        if self._end is None:
            return _USUALLY if now - self.start <= _USUAL_SECONDS else _UNUSUAL
        return f"about {self._end - now:.0f} s left" if now < self._end else OVERDUE


@contextlib.contextmanager
def simulating(systems: Sequence[str]) -> Iterator[Searching]:
    """Shows what is simulated, each second on a terminal, elsewhere every few seconds.

    Args:
        systems: systems to compare.
    """
    with progress("distca simulate", "iterations", doing=_USUALLY) as shown:
        yield Searching(shown, systems)


@contextlib.contextmanager
def telling_the_best(systems: Sequence[str], batches: int) -> Iterator[Callable[[Trials], None]]:
    """Says what was fastest so far if a signal ends the block: of DistCA, and of all others.

    It comes after the last line on the progress, so the block is around what shows that.

    Args:
        systems: systems to compare.
        batches: number of all batches.

    Yields:
        A function that takes the iterations that the searches run.
    """
    watched: list[Trials] = []
    try:
        yield watched.append
    except KeyboardInterrupt:
        ours = [system for system in systems if system in DISTCA_SYSTEMS]
        others = [system for system in systems if system not in DISTCA_SYSTEMS]
        found: list[list[tuple[Candidate, list[float]]]] = []
        for kind in (ours, others):
            bests = [trials.best_so_far(system) for trials in watched for system in kind]
            found.append([best for best in bests if best is not None])
        # All in the same batches, since batches differ.
        ran = min((len(seconds) for each in found for _, seconds in each), default=0)
        parts = []
        for each in filter(None, found):
            means = {candidate: fmean(seconds[:ran]) for candidate, seconds in each}
            best = min(means, key=lambda candidate: means[candidate])
            parts.append(f"{TITLES[best.system]}, {best}: {means[best]:.3f} s an iteration")
        said = "nothing was found yet"
        if parts:
            said = f"best up to then: {'; '.join(parts)}, in {ran} of {batches} batches"
        sys.stderr.write(f"distca simulate: {said}\n")
        raise
