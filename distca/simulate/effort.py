"""How far a search goes, and what it asks of those who simulate for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from distca.simulate.trials import Trial
from distca.simulate.workload import Candidate, Workload


class Evaluate(Protocol):
    """Simulates configurations in the first batches; may stop after one in which they don't fit."""

    def __call__(
        self, some: Sequence[Candidate], count: int, *, parts: bool = False
    ) -> Mapping[Candidate, Sequence[Trial]]:
        """Returns the trials of each configuration.

        Args:
            some: configurations.
            count: number of batches.
            parts: whether the first batch of those that run it now is broken down, too.
        """
        ...


Variants = Callable[[Candidate, Workload], list[Candidate]]
"""Lists variants of a configuration."""


@dataclass(frozen=True)
class Effort:
    """Extent of a search for a system's best configuration.

    Attributes:
        keep: number of configurations, fastest in the first round, that are found for sure. That
            round leaves out configurations whose bounds are above these. With `--distca` it also
            leaves out pipelines whose `estimate` is above these, and configurations that only
            divide a batch further than others that fit: without a pipeline this costs launches and
            exchanges and gains memory alone.
        batches: number of batches in which these are compared. The best one runs all in any case.
        first: number of batches of the first round. After one batch, which tells no range, the
            configurations that `keep` counts run more; after several all that are not much slower.
        fitting: number of configurations that are to fit in the first round, in the order of their
            `estimate`; None: all that do, in the order of their bounds.
        alternatives: function of a configuration that fits, which returns others for the first
            round, before further ones are held against all that fit, or None.
        sweeps: variants of the best one that run the same batches, in turn: each a function of it,
            and the ratio up to which the first of equally fast ones is taken.
        last_tolerance: value of `Candidate.tolerance` that is tried where nothing fits, or None.
        whole_iterations: whether last figures are those of whole iterations even if a part can
            stand for them.
    """

    keep: int
    batches: int
    first: int = 1
    fitting: int | None = None
    alternatives: Variants | None = None
    sweeps: Sequence[tuple[Variants, float]] = ()
    last_tolerance: float | None = None
    whole_iterations: bool = False
