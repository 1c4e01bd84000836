"""The best parallel configuration of each system for a workload.

A search runs its configurations in rounds: all, or those that promise most, on the first batch; the
fastest of these on more; and the fastest of those on all. `Effort` says how many, and `Evaluate`
where they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distca.plan.span import Int64s
from distca.schedule import BufferBoundError
from distca.simulate.outcome import Outcome
from distca.simulate.space import (
    candidates,
    divisions,
    estimate,
    sizes_of,
    with_chains,
    with_kept_inputs,
    with_less_memory,
    with_smaller_buffers,
    without_latents,
)
from distca.simulate.workload import DISTCA_SYSTEMS, Candidate, Workload, simulate

_TRIES = 4
"""Bound on the configurations that the first round runs once one fits, per one that is to fit."""
_LAST_RESORTS = 4
"""Configurations, those that need least memory, that are tried with less where none fits."""
_WORTH_IT = 1.01
"""Ratio up to which steps count as equally long: smaller micro-batches cost a little that is not
simulated, such as smaller kernels."""


@dataclass(frozen=True)
class Trial:
    """Figures of an iteration that a search compares.

    Attributes:
        fits: whether no GPU runs out of memory.
        seconds: time of the iteration.
        tokens: number of tokens in the global batch.
        memory_gb: memory of the GPU that needs most.
        idle: share of the time in which compute is not busy.
        exposed: share of the time in which compute waits for exchanges, and for others in them.
    """

    fits: bool
    seconds: float
    tokens: int
    memory_gb: float
    idle: float
    exposed: float

    @staticmethod
    def of(outcome: Outcome) -> Trial:
        """Takes the figures of an outcome."""
        return Trial(
            outcome.fits,
            outcome.seconds,
            outcome.tokens,
            float(outcome.memory_bytes.max()) / 1e9,
            outcome.idle,
            float(outcome.exposed.mean()) / outcome.seconds,
        )

    @staticmethod
    def run(candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]) -> Trial:
        """Simulates an iteration; one that no plan can have does not fit."""
        try:
            return Trial.of(simulate(candidate, workload, sequences))
        except BufferBoundError:
            return Trial.impossible(workload)

    @staticmethod
    def impossible(workload: Workload) -> Trial:
        """Figures of an iteration for which there is no plan."""
        none = float("nan")
        tokens = workload.sequences * workload.context
        return Trial(False, math.inf, tokens, math.inf, none, none)


@dataclass(frozen=True)
class Choice:
    """A system in its best configuration.

    Attributes:
        system: one of `SYSTEMS`.
        candidate: best configuration; None: all are out of memory, or nothing divides.
        seconds: time of an iteration, the mean over all batches.
        tokens_per_second: throughput of all GPUs together.
        memory_gb: memory of the GPU that needs most, over all batches.
        idle: share of the time in which compute is not busy.
        exposed: share of the time in which compute waits for exchanges, and for others in them.
        tried: number of configurations that divide the workload.
        simulated: number of configurations that ran.
        out_of_memory: number of configurations that are known not to fit.
    """

    system: str
    candidate: Candidate | None
    seconds: float
    tokens_per_second: float
    memory_gb: float
    idle: float
    exposed: float
    tried: int
    simulated: int
    out_of_memory: int


Evaluate = Callable[[Sequence[Candidate], int], Mapping[Candidate, Sequence[Trial]]]
"""Simulates configurations in the first batches; may stop after one in which they don't fit."""


@dataclass(frozen=True)
class Effort:
    """Extent of a search for a system's best configuration.

    Attributes:
        fitting: number of configurations that are to fit in the first round; None: all that do.
        first: number of batches of the first round; at most all.
        near: ratio to the best estimate up to which tensor-parallel sizes take turns. An estimate
            says least of small ones, whose exchanges are large.
        tolerances: values of `Candidate.tolerance`: the first round has the first one, and where
            nothing fits, the last one is tried, too.
        variants: function of the configurations that fit, the fastest first, which returns more, or
            the same, for the first round.
        rounds: for each further round the number of configurations, and of batches.
        compared: number of configurations that are to fit in all batches; None: all that do.
        sweeps: variants of the best one that run all batches, in turn: each a function of it, and
            the ratio up to which the first of equally fast ones is taken.
    """

    fitting: int | None = None
    first: int = 1
    near: float = 0.0
    tolerances: Sequence[float | None] = (None,)
    variants: Callable[[Sequence[Candidate]], list[Candidate]] = lambda fitting: []
    rounds: Sequence[tuple[int, int]] = ()
    compared: int | None = None
    sweeps: Sequence[tuple[Callable[[Candidate, Workload], list[Candidate]], float]] = ()


def find_best(
    system: str,
    workload: Workload,
    documents: Sequence[Int64s],
    tensor: Sequence[int],
    stages: Sequence[int],
    batches: int,
    evaluate: Evaluate,
    effort: Effort,
) -> Choice:
    """Finds the best configuration of a system.

    Args:
        system: one of `SYSTEMS`.
        workload: model, cluster and sizes.
        documents: sequences of the first batch, by which configurations promise.
        tensor: tensor-parallel sizes to try.
        stages: pipeline sizes to try.
        batches: number of all batches.
        evaluate: simulates configurations.
        effort: extent of the search.

    Raises:
        ValueError: there is no such system.
    """
    tried = len(divisions(system, workload, tensor, stages))
    able = candidates(system, workload, tensor, stages)
    left = able if effort.fitting is None else by_promise(able, workload, documents, effort.near)
    left = [replace(candidate, tolerance=effort.tolerances[0]) for candidate in left]
    search = _Search(workload, batches, evaluate, effort, left)
    best: Candidate | None = None
    while search.left and best is None:
        best = search.next_best()
        if best is None and not search.left:
            search.left = search.last_resorts()
    if best is not None:
        best = search.sweep(best)
    simulated = len({sizes_of(candidate) for candidate in search.trials})
    counts = tried, simulated, tried - len(able) + search.failed()
    if best is None:
        none = float("nan")
        return Choice(system, None, none, none, none, none, none, *counts)
    trials = search.trials[best]
    seconds = sum(trial.seconds for trial in trials)
    return Choice(
        system,
        best,
        seconds / len(trials),
        sum(trial.tokens for trial in trials) / seconds,
        max(trial.memory_gb for trial in trials),
        float(np.mean([trial.idle for trial in trials])),
        float(np.mean([trial.exposed for trial in trials])),
        *counts,
    )


def by_promise(
    able: Sequence[Candidate], workload: Workload, documents: Sequence[Int64s], near: float
) -> list[Candidate]:
    """Orders configurations by `estimate`; see `Effort.near`."""
    seconds = {candidate: estimate(candidate, workload, documents) for candidate in able}
    order = sorted(able, key=lambda candidate: seconds[candidate])
    close = [c for c in order if seconds[c] <= near * seconds[order[0]]]
    turn = {c: sum(c.tensor == o.tensor for o in close[:n]) for n, c in enumerate(close)}
    return sorted(order, key=lambda candidate: turn.get(candidate, len(order)))


@dataclass
class _Search:
    """A search under way.

    Attributes:
        workload: model, cluster and sizes.
        batches: number of all batches.
        evaluate: simulates configurations.
        effort: extent of the search.
        left: configurations that have not run, in the order in which they do.
        trials: figures of configurations that ran, of the first batches.
    """

    workload: Workload
    batches: int
    evaluate: Evaluate
    effort: Effort
    left: list[Candidate]
    trials: dict[Candidate, Sequence[Trial]] = field(default_factory=dict)

    def next_best(self) -> Candidate | None:
        """Takes configurations through all rounds; returns the fastest that fits, if any does."""
        effort = self.effort
        fitting = self._first_round()
        variants = effort.variants(fitting)
        order = self._run(variants, effort.first) + [c for c in fitting if c not in variants]
        for number, count in effort.rounds:
            fastest = self._run(order[:number], count)
            order = fastest + order[number:]
        compared = len(order) if effort.compared is None else effort.compared
        able: list[Candidate] = []
        at = 0
        while at < len(order) and len(able) < compared:
            some = order[at : at + compared - len(able)]
            able += self._run(some, self.batches)
            at += len(some)
        # What does not fit in a later batch may in a configuration that takes less memory.
        self.left[:0] = self._substitutes(order)
        return min(able, key=self._seconds, default=None)

    def _first_round(self) -> list[Candidate]:
        """Takes configurations from `left` until enough fit; returns these, the fastest first.

        Stops early once one fits and `_TRIES` times as many as wanted have run; goes on to the end
        if none fits.
        """
        effort, left = self.effort, self.left
        wanted = len(left) if effort.fitting is None else effort.fitting
        fitting: list[Candidate] = []
        tries = 0
        while left and len(fitting) < wanted and (not fitting or tries < _TRIES * wanted):
            # Of each a substitute may run, too.
            number = min(wanted - len(fitting), max((_TRIES * wanted - tries) // 2, 1))
            some = left[:number]
            del left[:number]
            tries += len(some)
            fitting += self._run(some, effort.first)
            left[:0] = self._substitutes(some)
        return sorted(fitting, key=self._seconds)

    def last_resorts(self) -> list[Candidate]:
        """Configurations that have not run, for a workload in which none fits: with the last
        tolerance, and with smaller buffers, which cost time."""
        failed = sorted(self.trials, key=lambda c: max(t.memory_gb for t in self.trials[c]))
        sizes = list(dict.fromkeys(map(sizes_of, failed)))[:_LAST_RESORTS]
        least = [next(c for c in failed if sizes_of(c) == each) for each in sizes]
        tolerances = (self.effort.tolerances[0], self.effort.tolerances[-1])
        tolerant = [replace(c, tolerance=t) for c in least for t in dict.fromkeys(tolerances)]
        bounded = [o for each in tolerant for o in with_smaller_buffers(each, self.workload)]
        return [c for c in tolerant + bounded if c not in self.trials]

    def sweep(self, best: Candidate) -> Candidate:
        """Replaces the best configuration by its best variants, in the order of the sweeps."""
        for variants, worth_it in self.effort.sweeps:
            able = [best, *self._run(variants(best, self.workload), self.batches, in_order=True)]
            fastest = min(map(self._seconds, able))
            best = next(c for c in able if self._seconds(c) <= worth_it * fastest)
        return best

    def failed(self) -> int:
        """Counts the sizes that ran and don't fit, in any variant; unless one of them is left."""
        able = {sizes_of(candidate) for candidate in self.trials if self._fits(candidate)}
        unknown = {sizes_of(candidate) for candidate in self.left}
        return len({sizes_of(candidate) for candidate in self.trials} - able - unknown)

    def _run(
        self, some: Sequence[Candidate], count: int, in_order: bool = False
    ) -> list[Candidate]:
        """Runs configurations in the first batches; returns those that fit, the fastest first."""
        if some:
            self.trials |= self.evaluate(some, min(count, self.batches))
        able = [candidate for candidate in some if self._fits(candidate)]
        return able if in_order else sorted(able, key=self._seconds)

    def _fits(self, candidate: Candidate) -> bool:
        return all(trial.fits for trial in self.trials[candidate])

    def _seconds(self, candidate: Candidate) -> float:
        return sum(trial.seconds for trial in self.trials[candidate])

    def _substitutes(self, some: Sequence[Candidate]) -> list[Candidate]:
        """Configurations that have not run, and take less memory than those that don't fit."""
        failed = [candidate for candidate in some if not self._fits(candidate)]
        less = [other for each in failed for other in with_less_memory(each, self.workload)]
        return [candidate for candidate in less if candidate not in self.trials]


def advise(
    workload: Workload,
    batches: Sequence[Sequence[Int64s]],
    systems: Sequence[str],
    tensor: Sequence[int],
    stages: Sequence[int],
    finalists: int = 6,
    progress: Callable[[str], None] = lambda what: None,
    tolerances: Sequence[float] = (),
) -> list[Choice]:
    """Finds the best configuration of each system.

    All configurations of a baseline run all batches, until they do not fit. With `--distca`, whose
    planning takes longer, configurations run the first batch in the order of `estimate`, until
    enough of them fit; the best of these run all batches, and the very best with chains, keys and
    values instead of latents, other tolerances, and inputs that are kept, too.

    Args:
        workload: model, cluster and sizes.
        batches: sequences of each global batch, as `simulate` takes them.
        systems: names in `SYSTEMS`.
        tensor: tensor-parallel sizes to try.
        stages: pipeline sizes to try.
        finalists: configurations with `--distca` that are to fit in the first batch.
        progress: function that is called with each configuration that is simulated.
        tolerances: values of `Candidate.tolerance` to try beside the workload's.

    Raises:
        ValueError: there is no batch or no such system.
    """
    if not batches:
        raise ValueError("no batches to simulate: give at least 1")
    with_plans = Effort(
        fitting=finalists,
        compared=3,
        sweeps=(
            (with_chains, _WORTH_IT),
            (without_latents, 1.0),
            # A tolerance costs a user nothing.
            (lambda best, _: [replace(best, tolerance=each) for each in tolerances], 1.0),
            (with_kept_inputs, 1.0),
        ),
    )
    trials: dict[Candidate, list[Trial]] = {}

    def evaluate(some: Sequence[Candidate], count: int) -> dict[Candidate, list[Trial]]:
        for candidate in some:
            mine = trials.setdefault(candidate, [])
            while len(mine) < count and all(trial.fits for trial in mine):
                progress(f"{candidate.system}: {candidate}")
                mine.append(Trial.run(candidate, workload, batches[len(mine)]))
        return {candidate: trials[candidate] for candidate in some}

    def choice(system: str) -> Choice:
        effort = with_plans if system in DISTCA_SYSTEMS else Effort()
        sizes = tensor, stages, len(batches)
        return find_best(system, workload, batches[0], *sizes, evaluate, effort)

    return [choice(system) for system in systems]
