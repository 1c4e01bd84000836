"""Progress of `distca simulate`: iterations done, and about how long the rest takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from distca.progress import progress
from distca.simulate import DISTCA_SYSTEMS, Candidate
from distca.simulate.bins import PACKED_BY_WORK
from distca.simulate.hybrid import HYBRID
from distca.simulate.trials import Told

_OTHERS = {HYBRID: 1.0, "per-document-cp": 0.05}
"""Time of a baseline's iteration over that of one with `--distca`, until it is known: about, as
seen with 64 to 1,024 GPUs. Megatron's scheduler takes seconds, and runs in one process."""
_PACKED_BY_WORK = 0.25
"""The same of WLB-LLM, of whose configurations bounds leave more than of others."""
_IN_TURN = 0.01
"""The same of baselines whose bins hold documents one after the other."""


@dataclass
class Rest:
    """Estimate of the time that a search still takes.

    Attributes:
        expected: iterations that each system is expected to take, by system.
        now: clock, in seconds.
        done: iterations that each system has taken.
        seconds: time that they took.
    """

    expected: Mapping[str, int]
    now: Callable[[], float] = time.monotonic
    done: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.now()

    def count(self, system: str, left: int) -> float:
        """Counts an iteration; returns the seconds that the rest takes at the pace so far.

        Args:
            system: system whose iteration has ended.
            left: iterations of the system that are sure to follow.
        """
        now = self.now()
        self.done[system] = self.done.get(system, 0) + 1
        self.seconds[system] = self.seconds.get(system, 0.0) + now - self.last
        self.last = now
        # Systems come one after the other: those before this one have ended.
        rest = max(self.expected[system] - self.done[system], left) * self._each(system)
        return rest + sum(
            number * self._each(other)
            for other, number in self.expected.items()
            if other not in self.done
        )

    def _each(self, system: str) -> float:
        """Seconds of an iteration of a system; until it has one, about, from those of others."""
        known = {name: self.seconds[name] / number for name, number in self.done.items()}
        if system in known:
            return known[system]
        # In units of an iteration with `--distca`.
        units = sum(number * _about(name) for name, number in self.done.items())
        return sum(self.seconds.values()) / units * _about(system)


def _about(system: str) -> float:
    """Time of a system's iteration over that of one with `--distca`, about."""
    if system in DISTCA_SYSTEMS:
        return 1.0
    return _OTHERS.get(system, _PACKED_BY_WORK if system in PACKED_BY_WORK else _IN_TURN)


@contextlib.contextmanager
def simulating(expected: Mapping[str, int]) -> Iterator[Told]:
    """Yields what shows each iteration, and about how long the rest takes.

    Args:
        expected: iterations that each system is expected to take.
    """
    rest = Rest(expected)
    with progress("distca simulate", "iterations") as shown:

        def told(candidate: Candidate, left: int) -> None:
            seconds = rest.count(candidate.system, left)
            shown.describe(f"about {seconds:.0f} s left, at {candidate.system}: {candidate}")
            shown.update()

        yield told
