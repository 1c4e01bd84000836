"""The best parallel configuration of a system for a workload.

A search runs its configurations in rounds: all, or those that promise most, on the first batches;
the fastest of these on more; and the fastest of those on all. A configuration that is clearly
slower than another in the batches that both have run is left out before it runs more. `Effort`
says how many run, and `Evaluate` where. Configurations whose lower bound of time
(`distca.simulate.bounds`) is above the time of others need not run. `advice` has the efforts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from distca.plan.span import Int64s
from distca.simulate.bounds import Bounds
from distca.simulate.choice import Choice
from distca.simulate.effort import Effort, Evaluate
from distca.simulate.few_parts import few_parts, has_few_parts
from distca.simulate.parts import RunParts, glance
from distca.simulate.space import candidates, divisions, estimate
from distca.simulate.speed_up import SpeedUp
from distca.simulate.stand_ins import StandIns
from distca.simulate.trials import Trial
from distca.simulate.variants import (
    is_simple,
    last_resorts,
    may_fit_in_halves,
    only_divides_further,
    sizes_of,
    with_a_few_more_micro_batches,
    with_less_memory,
    with_more_micro_batches,
)
from distca.simulate.workload import DISTCA_SYSTEMS, Candidate, Workload

_TRIES = 4
"""Bound on the configurations that the first round runs once one fits, per one that is to fit."""
_WAVE, _PAIR = 8, 2
"""Most configurations that run before others are held against them; and with `--distca`."""
_NEAR = 1.005
"""Ratio to another configuration's seconds up to which one that has run one batch runs more."""
_HOPEFUL = 1.1
"""Ratio to the fastest up to which one that has run the several batches of the first round runs
more."""
_OTHER_KIND = 1.03
"""Ratio to the seconds of the best up to which the best with or without server pools, or shared
heads, gets variants of its own."""
_PROMISED = 0.95
"""Share of the seconds that a part of an iteration promises which all of it takes at least: two
ticks promised 0.97 to 1.03 times as many as more of them took, on 1,024 GPUs."""
_CLOSE = 1.01
"""Ratio to the seconds of the best up to which another may be faster that a part stood for."""
_COMPARED, _SWEPT = 0.5, 0.7
"""Share of a search's time until its first rounds are over, and variants of the best, about."""
_SURE = 8
"""Batches that tell the range of a ratio. Long documents are in few of them: two layouts of WLB-LLM
at 512K had 1.050 in 4 batches of 2 sequences, and 0.963 in 24."""


def find_best(
    system: str,
    workload: Workload,
    batches: Sequence[Sequence[Int64s]],
    tensor: Sequence[int],
    stages: Sequence[int],
    evaluate: Evaluate,
    effort: Effort,
    parts_of: Callable[[int], RunParts] | None = None,
    reached: Callable[[float], None] = lambda share: None,
) -> Choice:
    """Finds the best configuration of a system.

    Args:
        system: one of `SYSTEMS`.
        workload: model, cluster and sizes.
        batches: sequences of each batch; configurations promise by those of the first.
        tensor: tensor-parallel sizes to try.
        stages: pipeline sizes to try.
        evaluate: simulates configurations.
        effort: extent of the search.
        parts_of: function of a batch's number, which returns what simulates parts of its
            iterations; None: this process does.
        reached: called with the share of the search that is done, as far as that is known.

    Raises:
        ValueError: there is no such system.
    """
    tried = len(divisions(system, workload, tensor, stages))
    able = candidates(system, workload, tensor, stages)
    bounds = [
        Bounds(workload, documents, None if parts_of is None else parts_of(number))
        for number, documents in enumerate(batches)
    ]
    first, later = bounds[: effort.first], bounds[effort.first :]
    search = _Search(workload, batches, evaluate, effort, [*able], first, later=later)
    if effort.fitting is None:
        search.left.sort(key=search.bound)
    else:
        search.left.sort(key=lambda candidate: estimate(candidate, workload, batches[0]))
    best: Candidate | None = None
    while search.left and best is None:
        starts = search.next_best()
        reached(_COMPARED)
        if starts:
            swept = [search.sweep(each) for each in starts]
            reached(_SWEPT)
            best = search.in_all_batches(search.fastest_of(swept))
        if best is None and not search.left:
            search.left = search.last_resorts()
    # Server pools are variants of sizes, and may have run with other numbers of micro-batches.
    simulated = len({sizes_of(c) for c in search.trials if c.pool_size is None})
    counts = tried, simulated, tried - len(able) + search.failed()
    return Choice.of(system, best, search.trials.get(best, ()) if best else (), *counts)


@dataclass
class _Search:
    """A search under way.

    Attributes:
        workload: model, cluster and sizes.
        batches: sequences of each batch.
        evaluate: simulates configurations.
        effort: extent of the search.
        left: configurations that have not run, in the order in which they do.
        bounds: lower bounds of their time in each batch of the first round.
        trials: figures of configurations that ran, of the first batches.
        later: bounds of the other batches.
    """

    workload: Workload
    batches: Sequence[Sequence[Int64s]]
    evaluate: Evaluate
    effort: Effort
    left: list[Candidate]
    bounds: Sequence[Bounds]
    trials: dict[Candidate, Sequence[Trial]] = field(default_factory=dict)
    later: Sequence[Bounds] = ()

    def next_best(self) -> list[Candidate]:
        """Takes configurations through all rounds; returns the fastest that fits, if any does, and
        the fastest of other kinds, which may be the faster one with variants of its own."""
        fitting = self._first_round()
        count = self._compared_batches
        kept = fitting[: self.effort.keep]
        if self._first > 1 and fitting:
            most = _HOPEFUL * self._seconds(fitting[0], self._first)
            kept = [each for each in fitting if self._seconds(each, self._first) <= most]
        kept += [each for each in self._of_each_kind(fitting, self._first) if each not in kept]
        order = self._race(kept, count)
        order += self._most_tried([candidate for candidate in fitting if candidate not in order])
        # What is fast in one batch may not fit in another.
        best = next((candidate for candidate in order if self._run([candidate], count)), None)
        # What does not fit in a later batch may in a configuration that takes less memory.
        self.left[:0] = self._substitutes(fitting)
        if best is None:
            return []
        ran = [each for each in order if len(self.trials[each]) >= count and self._fits(each)]
        return self._of_each_kind([best, *ran], count)

    def _of_each_kind(self, some: Sequence[Candidate], count: int) -> list[Candidate]:
        """Returns the first of the configurations, and the first with and without server pools and
        shared heads that are nearly as fast; where one batch chooses, the first alone."""
        if not some or self._compared_batches == 1 or self.effort.alternatives is None:
            return [*some[:1]]
        most, kinds = _OTHER_KIND * self._seconds(some[0], count), dict[object, Candidate]()
        for each in some:
            if self._seconds(each, count) <= most:
                kinds.setdefault((each.pool_size is None, each.head_parallel > 1), each)
        return [*kinds.values()]

    @property
    def _compared_batches(self) -> int:
        return min(self.effort.batches, len(self.batches))

    @property
    def _first(self) -> int:
        """Number of batches of the first round."""
        return len(self.bounds)

    @property
    def _stand_ins(self) -> StandIns:
        alone = self._compared_batches == 1
        batches = [*self.bounds, *(self.later if alone else ())]
        return StandIns(self.workload, self.evaluate, alone, batches)

    def bound(self, candidate: Candidate) -> float:
        """Returns seconds that the batches of the first round take at least."""
        return sum(bounds.seconds(candidate) for bounds in self.bounds)

    def _race(
        self, some: Sequence[Candidate], count: int, worth_it: float = 1.0
    ) -> list[Candidate]:
        """Runs configurations in more and more batches, but for those that fall behind.

        Args:
            some: configurations that have run the batches of the first round.
            count: number of batches.
            worth_it: ratio up to which configurations count as equally fast.

        Returns:
            Those that fit and have run that many batches, the fastest first.
        """
        ran = min(_SURE, count)
        left = self._run(some, ran)
        while left and ran < count:
            best = left[0]
            left = [best, *(c for c in left[1:] if not self._is_behind(c, best, ran, worth_it))]
            ran = min(2 * ran, count)
            left = self._run(left, ran)
        return left

    def _is_behind(
        self, candidate: Candidate, best: Candidate, count: int, worth_it: float
    ) -> bool:
        """Whether the first batches tell that a configuration is slower than the fastest, or that
        it does the same."""
        ours, others = (
            [trial.seconds for trial in self.trials[each][:count]] for each in (candidate, best)
        )
        return ours == others or SpeedUp.of(ours, others).high * worth_it < 1

    def _first_round(self) -> list[Candidate]:
        """Takes configurations from `left` until enough fit; returns these, the fastest first.

        Stops early once one fits and `_TRIES` times as many as wanted have run.
        """
        effort, left = self.effort, self.left
        wanted = len(left) if effort.fitting is None else effort.fitting
        fitting: list[Candidate] = []
        others: list[Candidate] = []
        # Samples of these promise more time than others take.
        behind: list[Candidate] = []
        tries = 0
        while (
            left
            and len(fitting) + len(behind) < wanted
            and (not fitting or tries < _TRIES * wanted)
        ):
            # Of each a substitute may run, too.
            number = wanted - len(fitting) - len(behind)
            some = self._take(min(number, max((_TRIES * wanted - tries) // 2, 1)), fitting, behind)
            if not some:
                break
            tries += len(some)
            found = self._run(some, self._first)
            fitting += found
            others += self._run_alternatives(found)
            left[:0] = self._substitutes(some)
        both = [*fitting, *others, *self._run_other_pools()]
        return sorted(both, key=lambda candidate: self._seconds(candidate, self._first))

    def _run_alternatives(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Runs alternatives of configurations, with more micro-batches where they do not fit, but
        for those that `Effort.keep` leaves out; returns those that fit."""
        more = self.effort.alternatives
        left = [o for each in found for o in (more(each, self.workload) if more else [])]
        able: list[Candidate] = []
        while left:
            failed = self._stand_ins.too_large(left)
            left = [each for each in left if each not in failed]
            for bounds in self.bounds:
                bounds.prepare(few_parts, [*filter(has_few_parts, left)])
            left = sorted(left, key=self._least)
            some = [each for each in left if self._least(each) <= self._most][:_PAIR]
            able += self._run(some, self._first)
            failed += [each for each in some if not self._fits(each)]
            left = [each for each in left if each not in some] if some else []
            # No number of micro-batches cuts a document that is too long for its pool.
            failed = [c for c in failed if not self._holds_no_document(c)]
            used = {each: 1e9 * run[-1].memory_gb for each, run in self.trials.items()}
            failed = [c for c in failed if may_fit_in_halves(c, self.workload, used)]
            left += [o for each in failed for o in with_more_micro_batches(each, self.workload)]
        return able

    def _run_other_pools(self) -> list[Candidate]:
        """Runs server pools of tensor-parallel sizes that have not run any; returns those that fit.

        Sizes run in the order of what they promise without pools. Among many ranks those that come
        last by it may be the fastest in pools.
        """
        if self.effort.alternatives is None:
            return []
        ran = {each.tensor for each in self.trials if each.pool_size is not None}
        bases: dict[int, Candidate] = {}
        for base in sorted(self.left, key=lambda candidate: candidate.micro_batches):
            if base.stages == 1 and base.tensor not in ran:
                bases.setdefault(base.tensor, base)
        able: list[Candidate] = []
        for base in sorted(bases.values(), key=self.bound):
            if self.bound(base) < self._most_of(1):
                able += self._run_alternatives([base])
        return able

    @property
    def _most(self) -> float:
        """Seconds of the first round above which `Effort.keep` leaves configurations out."""
        return self._most_of(self.effort.keep)

    def _most_of(self, number: int) -> float:
        """Returns the seconds in the first round of the slowest of the fastest few."""
        first = sorted(self._seconds(c, self._first) for c in self.trials if self._fits(c))
        return first[number - 1] if len(first) >= number else np.inf

    def _least(self, candidate: Candidate) -> float:
        """Returns seconds that a configuration takes at least in the first round."""
        return max(self._ideal(candidate), self.bound(candidate))

    def _ideal(self, candidate: Candidate) -> float:
        """Returns the `estimate` of a pipeline with `--distca` in the first round; else 0.0. It is
        no bound, as idle stages may take more than their share of a tick."""
        if candidate.system not in DISTCA_SYSTEMS or candidate.stages == 1:
            return 0.0
        return sum(estimate(candidate, self.workload, e) for e in self.batches[: self._first])

    def _promised(self, candidate: Candidate) -> float:
        """Returns seconds that a configuration promises, by two of many ticks."""
        return max(self._least(candidate), sum(each.promised(candidate) for each in self.bounds))

    def _take(
        self, number: int, fitting: Sequence[Candidate], behind: list[Candidate]
    ) -> list[Candidate]:
        """Takes the next configurations from `left`, but for those that `Effort.keep` leaves out.

        Args:
            number: most configurations to take, or to add to `behind`.
            fitting: configurations that have run in this round, and fit.
            behind: where those are added that samples leave out.
        """
        some: list[Candidate] = []
        wave = min(number, _WAVE if self.effort.alternatives is None else _PAIR)
        most = self._most
        most_taken = max(wave, self._considered(number))
        slow: list[Candidate] = []
        while len(some) < most_taken and len(some) + len(slow) < number:
            left = min(most_taken - len(some), number - len(some) - len(slow))
            able = self._able([*fitting, *some, *slow, *behind], left)
            if not able:
                break
            for bounds in self.bounds:
                bounds.prepare(glance, [*filter(bounds.has_many_ticks, able)])
            for each in able:
                promised = max(self._least(each), _PROMISED * self._promised(each))
                (some if promised <= most else slow).append(each)
        behind += slow
        if len(some) > wave:
            some = sorted(some, key=self._promised)[:wave]
        self.left[:] = [candidate for candidate in self.left if candidate not in (*some, *slow)]
        return some

    def _able(self, before: Sequence[Candidate], number: int) -> list[Candidate]:
        """Returns the next few of `left` whose bounds leave them in, and that do more than divide
        others further.

        Args:
            before: configurations that ran, or that come before them.
            number: most configurations to return.
        """
        most, able = self._most, list[Candidate]()
        for candidate in self.left:
            if len(able) == number:
                break
            others = (*before, *able)
            divided = any(only_divides_further(candidate, other) for other in others)
            if candidate not in before and not divided and self._least(candidate) <= most:
                able.append(candidate)
        return able

    def _considered(self, number: int) -> int:
        """Returns how many of the next configurations are held against each other before they run:
        those with many ticks take so long that the ones which promise most come first."""
        many = any(self.bounds[0].has_many_ticks(each) for each in self.left[:number])
        return number if many else 0

    def fastest_of(self, some: Sequence[Candidate]) -> Candidate:
        """Returns the fastest over all batches of those that fit; the first one if none does."""
        different = list(dict.fromkeys(some))
        if len(different) == 1:
            return different[0]
        return next(iter(self._run(different, len(self.batches), last=True)), different[0])

    def in_all_batches(self, best: Candidate) -> Candidate | None:
        """Returns the best configuration if it fits in all batches, else one that does: of those
        that have run most batches the fastest, or None.

        A part of an iteration may promise too little, or too much. So another may take its place.
        """
        whole = [each for each in self.trials if not self._stand_ins.able([each])]
        smaller = with_a_few_more_micro_batches(best, self.workload)
        for candidate in (best, *smaller, *self._most_tried([*self.trials])):
            if not self._run([candidate], len(self.batches), last=True):
                continue
            if candidate in whole:
                return candidate
            seconds = self._seconds(candidate, 1)
            able = [each for each in self.trials if each != candidate and self._fits(each)]
            faster = [c for c in able if c in whole and self._seconds(c, 1) < seconds]
            # Of those that promise about as little, one.
            near = [c for c in able if self._stand_ins.have_many_ticks([c])]
            near = [c for c in near if self._seconds(c, 1) < _CLOSE * seconds]
            faster += sorted(near, key=lambda each: self._seconds(each, 1))[:1]
            ran = [candidate, *self._run(faster, len(self.batches), last=True)]
            return min(ran, key=lambda each: self._seconds(each, len(self.batches)))
        return None

    def _most_tried(self, some: Sequence[Candidate]) -> list[Candidate]:
        """Returns those that fit so far, by the batches that they ran, then the fastest first."""
        ran = {each: len(self.trials[each]) for each in some if self._fits(each)}
        return sorted(ran, key=lambda each: (-ran[each], self._seconds(each, ran[each])))

    def last_resorts(self) -> list[Candidate]:
        """Configurations that have not run, for a workload in which none fits."""
        failed = sorted(self.trials, key=lambda c: max(t.memory_gb for t in self.trials[c]))
        some = last_resorts(failed, self.workload, self.effort.last_tolerance)
        able = [c for c in some if c.stages == 1 or is_simple(c) or self._stand_ins.able([c])]
        return [each for each in able if each not in self.trials]

    def sweep(self, best: Candidate) -> Candidate:
        """Replaces the best configuration by its best variants, in the order of the sweeps.

        Variants that are clearly slower in a first round of one batch run no others. Where that
        batch alone chooses, parts of iterations tell which variant is fastest.
        """
        first, count, best = self._first, self._compared_batches, self._stand_ins.with_room(best)
        for variants, worth_it in self.effort.sweeps:
            most = _NEAR * self._seconds(best, first) if best in self.trials else np.inf
            tried = variants(best, self.workload)
            tried = [c for c in tried if c.pool_size is None or self._ideal(c) <= most]
            if chosen := self._stand_ins.best([best, *tried], worth_it):
                best = chosen
                continue
            if best not in self.trials:  # A part chose it.
                self._run([best], first)
            most = max(worth_it, _NEAR) * self._seconds(best, first)
            tried = [c for c in tried if c.pool_size is None or self.bound(c) <= most]
            near = self._run(self._stand_ins.not_too_large(tried), first)
            if first == 1:
                near = [candidate for candidate in near if self._seconds(candidate, 1) <= most]
            raced = self._race([best, *near], count, worth_it)
            # What is faster than the best one may not fit in a later batch.
            able = [best, *(candidate for candidate in tried if candidate in raced)]
            fastest = min(self._seconds(candidate, count) for candidate in able)
            best = next(c for c in able if self._seconds(c, count) <= worth_it * fastest)
        return best

    def failed(self) -> int:
        """Counts the sizes that ran and don't fit, in any variant; unless one of them is left."""
        able = {sizes_of(candidate) for candidate in self.trials if self._fits(candidate)}
        unknown = {sizes_of(candidate) for candidate in self.left}
        ran = {sizes_of(candidate) for candidate in self.trials if candidate.pool_size is None}
        return len(ran - able - unknown)

    def _run(self, some: Sequence[Candidate], count: int, last: bool = False) -> list[Candidate]:
        """Runs configurations in the first batches; returns those that fit, the fastest first.

        Args:
            some: configurations.
            count: number of batches.
            last: whether these are their last figures. Else, where one batch chooses, a few server
                pools stand for many.
        """
        whole = last and self.effort.whole_iterations
        standing = [c for c in some if not whole and self._stand_ins.able([c])]
        able = [candidate for candidate in some if candidate not in standing]
        if not last:
            self._stand_ins.prepare(standing)
        for candidate in standing:
            if not last:
                self.trials.setdefault(candidate, [self._stand_ins.trial(candidate)])
            elif self._fits(candidate):
                self.trials[candidate] = self._stand_ins.extended(candidate, count)
        for each in filter(self._holds_no_document, able):
            self.trials.setdefault(each, [Trial.impossible(self.workload)])
        able = [each for each in able if self._fits(each)]
        if able:
            # Plans of many ticks take minutes, so that they are made once.
            parts = last or any(map(self.bounds[0].has_many_ticks, able))
            for candidate, run in self.evaluate(able, count, parts=parts).items():
                # What ran more batches before keeps them.
                self.trials[candidate] = max(run, self.trials.get(candidate, ()), key=len)
        able = [candidate for candidate in some if self._fits(candidate)]
        return sorted(able, key=lambda each: self._seconds(each, count))

    def _holds_no_document(self, candidate: Candidate) -> bool:
        return any(bounds.holds_no_document(candidate) for bounds in self.bounds)

    def _fits(self, candidate: Candidate) -> bool:
        return all(trial.fits for trial in self.trials.get(candidate, ()))

    def _seconds(self, candidate: Candidate, count: int) -> float:
        return sum(trial.seconds for trial in self.trials[candidate][:count])

    def _substitutes(self, some: Sequence[Candidate]) -> list[Candidate]:
        """Configurations that have not run, and take less memory than those that don't fit."""
        failed = [each for each in some if not self._fits(each)]
        less = [other for each in failed for other in with_less_memory(each, self.workload)]
        return [candidate for candidate in less if candidate not in self.trials]
