"""What the ranks of an iteration of inference spend their time on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from distca.plan.span import Floats
from distca.simulate.resources import Resources

LINEAR, ATTENTION, COLLECTIVES = "linear", "attention", "collectives"
LAUNCHES, EXCHANGES, HOST = "launches", "exchanges", "host"
PARTS = {
    LINEAR: "linear layers, which compute or read their weights",
    ATTENTION: "core attention's kernels, and merging their results",
    COLLECTIVES: "collectives of tensor parallelism",
    LAUNCHES: "launches of kernels, exchanges and a ring's steps, and gaps between kernels",
    EXCHANGES: "copies for exchanges, and waiting for what kernels do not hide",
    HOST: "waiting for the host, which schedules, plans and launches",
}
"""Parts of an iteration's time. Those of the rank that ends last add up to the iteration."""


@dataclass
class ServingResources(Resources):
    """Ranks whose time is counted by its parts.

    Attributes:
        spent: seconds of each rank on each of `PARTS` so far, `[ranks]`.
    """

    spent: dict[str, Floats] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spent = {part: np.zeros(self.ranks) for part in PARTS}

    def spend(
        self, parts: Mapping[str, Floats], name: str = "", lane: str = "", **labels: object
    ) -> None:
        """Lets each rank compute for the sum of the parts.

        Args:
            parts: seconds of each of some of `PARTS` when no exchange interferes, `[ranks]`.
            name, lane, labels: as for `compute`.
        """
        start, total = self.clock, sum(parts.values(), np.zeros(self.ranks))
        self.compute(total, name, lane, **labels)
        # Where exchanges interfere, all parts take longer in proportion.
        longer = np.divide(self.clock - start, total, out=np.zeros(self.ranks), where=total > 0)
        for part, seconds in parts.items():
            self.spent[part] += seconds * longer

    def wait(self, until: Floats, name: str = "", **labels: object) -> None:
        """Lets each rank wait until an exchange is over for it, `[ranks]`."""
        start = self.clock
        super().wait(until, name, **labels)
        self.spent[EXCHANGES] += self.clock - start

    def wait_for_host(self, until: Floats) -> None:
        """Lets each rank wait until its host has launched what is next, `[ranks]`."""
        start = self.clock
        self.clock = np.maximum(start, until)
        self.spent[HOST] += self.clock - start

    def of_last(self) -> dict[str, float]:
        """Returns the seconds of the rank that ends last, by part."""
        last = int(self.clock.argmax())
        return {part: float(seconds[last]) for part, seconds in self.spent.items()}
