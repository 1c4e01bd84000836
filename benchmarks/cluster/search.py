"""The best configuration of each system for a case of the simulated experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from benchmarks.cluster.sweep import Case, Runner, Unit, batch
from distca.simulate import BASELINES, Candidate, Choice
from distca.simulate.search import Effort, find_best
from distca.simulate.space import with_chains, with_kept_inputs
from distca.simulate.trials import Trial

_FIRST_BATCHES = 3
"""Batches of the second round."""
_BEYOND_THE_PAPER = ("tiles",)
"""Systems that are tried with chains of micro-batches and with inputs that servers keep, which the
paper has not."""
_LAST_TOLERANCE = 0.2
"""Tolerance that is tried where nothing fits with the others."""
BASELINE = Effort(rounds=((12, _FIRST_BATCHES),), compared=4)


@dataclass(frozen=True)
class Sweep:
    """Extent of the search for the best configuration with `--distca`.

    Attributes:
        batches: number of first batches on which configurations are compared.
        most_promising: number of configurations, fastest by `estimate`, that are to fit in memory.
        finalists: number of fastest configurations that are tried with each tolerance.
        tolerances: values of `Candidate.tolerance` to try.
    """

    batches: int
    most_promising: int
    finalists: int
    tolerances: tuple[float, ...]

    def effort(self, case: Case, system: str) -> Effort:
        """Extent of the search for the best configuration of a system with `--distca`."""

        def variants(fitting: Sequence[Candidate]) -> list[Candidate]:
            more: list[Candidate] = []
            if fitting and system in _BEYOND_THE_PAPER:
                best, workload = fitting[0], case.workload
                more = with_chains(best, workload) + with_kept_inputs(best, workload)
            return more + [
                replace(candidate, tolerance=tolerance)
                for candidate in fitting[: self.finalists]
                for tolerance in self.tolerances
            ]

        return Effort(
            fitting=self.most_promising,
            first=self.batches,
            near=1.15,
            tolerances=(*self.tolerances, _LAST_TOLERANCE),
            variants=variants,
            rounds=((2, _FIRST_BATCHES),),
            compared=1,
        )


def best_of(
    runner: Runner,
    case: Case,
    system: str,
    tensor: Sequence[int],
    stages: Sequence[int],
    batches: int,
    sweep: Sweep,
) -> Choice:
    """Finds the best configuration of a system for a case.

    Args:
        runner: runner of the simulations.
        case: workload and its documents.
        system: one of `distca.simulate.SYSTEMS`.
        tensor: tensor-parallel sizes to try.
        stages: pipeline sizes to try.
        batches: number of batches.
        sweep: extent of the search with `--distca`.
    """

    def evaluate(some: Sequence[Candidate], count: int) -> dict[Candidate, list[Trial]]:
        units = {candidate: Unit(case, candidate) for candidate in some}
        found = runner.over_batches(units, count, f"{case}: {system}")
        names = [field.name for field in fields(Trial)]
        return {
            candidate: [Trial(**{name: row[name] for name in names}) for row in rows]
            for candidate, rows in found.items()
        }

    effort = BASELINE if system in BASELINES else sweep.effort(case, system)
    sizes = tensor, stages, batches
    return find_best(system, case.workload, batch(case, 0), *sizes, evaluate, effort)
