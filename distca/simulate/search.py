"""The best parallel configuration of a system for a workload.

A search runs its configurations in rounds: all, or those that promise most, on the first batch; the
fastest of these on more; and the fastest of those on all. `Effort` says how many, and `Evaluate`
where they run. Configurations whose lower bound of time (`distca.simulate.bounds`) is above the
time of others need not run. `distca.simulate.advice` has the efforts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distca.plan.span import Int64s
from distca.simulate.bounds import Bounds
from distca.simulate.space import (
    candidates,
    divisions,
    estimate,
    only_divides_further,
    sizes_of,
    with_less_memory,
    with_more_micro_batches,
    with_smaller_buffers,
)
from distca.simulate.trials import Trial
from distca.simulate.workload import DISTCA_SYSTEMS, Candidate, Workload

_TRIES = 4
"""Bound on the configurations that the first round runs once one fits, per one that is to fit."""
_LAST_RESORTS = 4
"""Configurations, those that need least memory, that are tried with less where none fits."""
_WAVE, _PAIR = 8, 2
"""Most configurations that run before others are held against them; and with `--distca`."""
_NEAR = 1.005
"""Ratio to the best configuration's first batch up to which a variant of it runs more batches."""


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
        seconds_of_batches: time of the iteration of each batch.
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
    seconds_of_batches: tuple[float, ...] = ()


Evaluate = Callable[[Sequence[Candidate], int], Mapping[Candidate, Sequence[Trial]]]
"""Simulates configurations in the first batches; may stop after one in which they don't fit."""
Variants = Callable[[Candidate, Workload], list[Candidate]]
"""Lists variants of a configuration."""


@dataclass(frozen=True)
class Effort:
    """Extent of a search for a system's best configuration.

    Attributes:
        keep: number of configurations, fastest in the first batch, that are found for sure. The
            first round leaves out configurations whose bounds are above these. With `--distca` it
            also leaves out pipelines whose `estimate` is above these, and configurations that only
            divide a batch further than others that fit: without a pipeline this costs launches and
            exchanges and gains memory alone.
        batches: number of batches in which these are compared. The best one runs all in any case.
        fitting: number of configurations that are to fit in the first round, in the order of their
            `estimate`; None: all that do, in the order of their bounds.
        alternatives: function of a configuration that fits, which returns others for the first
            round, before further ones are held against all that fit; None: there are none.
        sweeps: variants of the best one that run the same batches, in turn: each a function of it,
            and the ratio up to which the first of equally fast ones is taken.
        last_tolerance: value of `Candidate.tolerance` that is tried where nothing fits; None: none.
    """

    keep: int
    batches: int
    fitting: int | None = None
    alternatives: Variants | None = None
    sweeps: Sequence[tuple[Variants, float]] = ()
    last_tolerance: float | None = None


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
    bounds = Bounds(workload, documents)
    if effort.fitting is None:
        left = sorted(able, key=bounds.seconds)
    else:
        left = sorted(able, key=lambda candidate: estimate(candidate, workload, documents))
    search = _Search(workload, documents, batches, evaluate, effort, left, bounds)
    best: Candidate | None = None
    while search.left and best is None:
        best = search.next_best()
        if best is not None:
            best = search.in_all_batches(search.sweep(best))
        if best is None and not search.left:
            search.left = search.last_resorts()
    # Server pools are variants of sizes, and may have run with other numbers of micro-batches.
    simulated = len({sizes_of(c) for c in search.trials if c.pool_size is None})
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
        tuple(trial.seconds for trial in trials),
    )


@dataclass
class _Search:
    """A search under way.

    Attributes:
        workload: model, cluster and sizes.
        documents: sequences of the first batch.
        batches: number of all batches.
        evaluate: simulates configurations.
        effort: extent of the search.
        left: configurations that have not run, in the order in which they do.
        bounds: lower bounds of their time in the first batch.
        trials: figures of configurations that ran, of the first batches.
    """

    workload: Workload
    documents: Sequence[Int64s]
    batches: int
    evaluate: Evaluate
    effort: Effort
    left: list[Candidate]
    bounds: Bounds
    trials: dict[Candidate, Sequence[Trial]] = field(default_factory=dict)

    def next_best(self) -> Candidate | None:
        """Takes configurations through all rounds; returns the fastest that fits, if any does."""
        fitting = self._first_round()
        keep, count = self.effort.keep, self._compared_batches
        order = self._run(fitting[:keep], count) + fitting[keep:]
        # What is fast in one batch may not fit in another.
        best = next((candidate for candidate in order if self._run([candidate], count)), None)
        # What does not fit in a later batch may in a configuration that takes less memory.
        self.left[:0] = self._substitutes(fitting)
        return best

    @property
    def _compared_batches(self) -> int:
        return min(self.effort.batches, self.batches)

    def _first_round(self) -> list[Candidate]:
        """Takes configurations from `left` until enough fit; returns these, the fastest first.

        Stops early once one fits and `_TRIES` times as many as wanted have run; goes on to the end
        if none fits.
        """
        effort, left = self.effort, self.left
        wanted = len(left) if effort.fitting is None else effort.fitting
        fitting: list[Candidate] = []
        others: list[Candidate] = []
        tries = 0
        while left and len(fitting) < wanted and (not fitting or tries < _TRIES * wanted):
            # Of each a substitute may run, too.
            number = min(wanted - len(fitting), max((_TRIES * wanted - tries) // 2, 1))
            some = self._take(number, fitting)
            if not some:
                break
            tries += len(some)
            found = self._run(some, 1)
            fitting += found
            others += self._run_alternatives(found)
            left[:0] = self._substitutes(some)
        both = [*fitting, *others]
        return sorted(both, key=lambda candidate: self._seconds(candidate, 1))

    def _run_alternatives(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Runs alternatives of configurations, with more micro-batches where they do not fit, but
        for those that `Effort.keep` leaves out; returns those that fit."""
        more, usable = self.effort.alternatives, self.workload.cluster.usable_bytes
        left = [o for each in found for o in (more(each, self.workload) if more else [])]
        able: list[Candidate] = []
        while left:
            failed = [each for each in left if self.bounds.least_memory(each) > usable]
            left = sorted((each for each in left if each not in failed), key=self._least)
            some = [each for each in left if self._least(each) <= self._most][:_PAIR]
            able += self._run(some, 1)
            failed += [each for each in some if not self._fits(each)]
            left = [each for each in left if each not in some] if some else []
            left += [o for each in failed for o in with_more_micro_batches(each, self.workload)]
        return able

    @property
    def _most(self) -> float:
        """Seconds of the first batch above which `Effort.keep` leaves configurations out."""
        keep = self.effort.keep
        first = sorted(run[0].seconds for c, run in self.trials.items() if self._fits(c))
        return first[keep - 1] if len(first) >= keep else np.inf

    def _least(self, candidate: Candidate) -> float:
        """Returns seconds that a configuration takes at least in the first batch.

        An `estimate` is no bound, as idle stages may take more than their share of a tick.
        """
        seconds = self.bounds.seconds(candidate)
        if candidate.system in DISTCA_SYSTEMS and candidate.stages > 1:
            return max(seconds, estimate(candidate, self.workload, self.documents))
        return seconds

    def _take(self, number: int, fitting: Sequence[Candidate]) -> list[Candidate]:
        """Takes the next configurations from `left`, but for those that `Effort.keep` leaves out.

        Args:
            number: most configurations to take.
            fitting: configurations that have run in this round, and fit.
        """
        left = self.left
        some: list[Candidate] = []
        wave = _WAVE if self.effort.alternatives is None else _PAIR
        most = self._most
        for candidate in left:
            if len(some) == min(number, wave):
                break
            before = (*fitting, *some)
            divided = any(only_divides_further(candidate, other) for other in before)
            if not divided and self._least(candidate) <= most:
                some.append(candidate)
        left[:] = [candidate for candidate in left if candidate not in some]
        return some

    def in_all_batches(self, best: Candidate) -> Candidate | None:
        """Returns the best configuration if it fits in all batches, else the fastest one that does
        and has run as many as it; None: none does."""
        count = self._compared_batches
        able = [c for c, run in self.trials.items() if len(run) >= count and self._fits(c)]
        able.sort(key=lambda candidate: self._seconds(candidate, count))
        for candidate in (best, *able):
            if self._run([candidate], self.batches):
                return candidate
        return None

    def last_resorts(self) -> list[Candidate]:
        """Configurations that have not run, for a workload in which none fits: with the last
        tolerance, and with smaller buffers, which cost time."""
        failed = sorted(self.trials, key=lambda c: max(t.memory_gb for t in self.trials[c]))
        sizes = list(dict.fromkeys(map(sizes_of, failed)))[:_LAST_RESORTS]
        least = [next(c for c in failed if sizes_of(c) == each) for each in sizes]
        # Variants that only ran a batch may need more memory in others.
        plain = [
            replace(each, pool_size=None, ping_pong=True, keeps_inputs=False, network_divisor=1)
            for each in least
        ]
        tolerances = dict.fromkeys((None, self.effort.last_tolerance))
        tolerant = [replace(each, tolerance=t) for each in plain for t in tolerances]
        bounded = [o for each in tolerant for o in with_smaller_buffers(each, self.workload)]
        return [candidate for candidate in tolerant + bounded if candidate not in self.trials]

    def sweep(self, best: Candidate) -> Candidate:
        """Replaces the best configuration by its best variants, in the order of the sweeps.

        Variants that are clearly slower in the first batch run no others. Where that batch alone
        chooses, among many server pools, a few of these tell which variant is fastest.
        """
        count = self._compared_batches
        for variants, worth_it in self.effort.sweeps:
            tried = variants(best, self.workload)
            if count == 1 and all(self.bounds.has_many_pools(c) for c in (best, *tried)):
                usable = self.workload.cluster.usable_bytes
                fit = [best, *(c for c in tried if self.bounds.least_memory(c) <= usable)]
                least = min(map(self.bounds.seconds, fit))
                best = next(c for c in fit if self.bounds.seconds(c) <= worth_it * least)
                continue
            most = max(worth_it, _NEAR) * self._seconds(best, 1)
            tried = [c for c in tried if c.pool_size is None or self.bounds.seconds(c) <= most]
            begun = self._run(tried, 1, in_order=True)
            near = [candidate for candidate in begun if self._seconds(candidate, 1) <= most]
            able = [best, *self._run(near, count, in_order=True)]
            fastest = min(self._seconds(candidate, count) for candidate in able)
            best = next(c for c in able if self._seconds(c, count) <= worth_it * fastest)
        return best

    def failed(self) -> int:
        """Counts the sizes that ran and don't fit, in any variant; unless one of them is left."""
        able = {sizes_of(candidate) for candidate in self.trials if self._fits(candidate)}
        unknown = {sizes_of(candidate) for candidate in self.left}
        ran = {sizes_of(candidate) for candidate in self.trials if candidate.pool_size is None}
        return len(ran - able - unknown)

    def _run(
        self, some: Sequence[Candidate], count: int, in_order: bool = False
    ) -> list[Candidate]:
        """Runs configurations in the first batches; returns those that fit, the fastest first."""
        count = min(count, self.batches)
        if some:
            self.trials |= self.evaluate(some, count)
        able = [candidate for candidate in some if self._fits(candidate)]
        return able if in_order else sorted(able, key=lambda each: self._seconds(each, count))

    def _fits(self, candidate: Candidate) -> bool:
        return all(trial.fits for trial in self.trials[candidate])

    def _seconds(self, candidate: Candidate, count: int) -> float:
        """Returns the seconds of the first batches."""
        return sum(trial.seconds for trial in self.trials[candidate][:count])

    def _substitutes(self, some: Sequence[Candidate]) -> list[Candidate]:
        """Configurations that have not run, and take less memory than those that don't fit."""
        failed = [candidate for candidate in some if not self._fits(candidate)]
        less = [other for each in failed for other in with_less_memory(each, self.workload)]
        return [candidate for candidate in less if candidate not in self.trials]
