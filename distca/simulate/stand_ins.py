"""Parts of iterations that stand for all of them while a search compares configurations.

They do where one batch chooses and planning takes long: among many server pools or ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from distca.simulate.bounds import Bounds
from distca.simulate.effort import Evaluate
from distca.simulate.few_parts import few_parts, has_few_parts, largest_micro_batch
from distca.simulate.parts import glance, sample
from distca.simulate.trials import Trial
from distca.simulate.variants import with_a_few_more_micro_batches
from distca.simulate.workload import Candidate, Workload


@dataclass(frozen=True)
class StandIns:
    """Parts of iterations.

    Attributes:
        workload: model, cluster and sizes.
        evaluate: simulates configurations.
        alone: whether one batch chooses among configurations.
        batches: bounds of all batches, or of the first ones.
    """

    workload: Workload
    evaluate: Evaluate
    alone: bool
    batches: Sequence[Bounds]

    @property
    def _first(self) -> Bounds:
        return self.batches[0]

    def able(self, some: Sequence[Candidate]) -> bool:
        """Whether a part of an iteration stands for each of the configurations."""
        return self.alone and all(map(self._first.stands_in, some))

    def have_few_parts(self, some: Sequence[Candidate]) -> bool:
        """Whether a few micro-batches of a few server pools do."""
        return self.alone and all(map(has_few_parts, some))

    def have_many_ticks(self, some: Sequence[Candidate]) -> bool:
        """Whether a sample and two ticks do."""
        return self.alone and all(map(self._first.has_many_ticks, some))

    def prepare(self, some: Sequence[Candidate]) -> None:
        """Simulates the parts of configurations, at a time where that can be."""
        self._first.prepare(few_parts, [*filter(has_few_parts, some)])
        ticks = [*filter(self._first.has_many_ticks, some)]
        self._first.prepare(glance, ticks)
        self._first.prepare(sample, ticks)

    def trial(self, candidate: Candidate) -> Trial:
        """Returns the first batch's figures, as far as a part tells them."""
        return self._first.stand_in(candidate)

    def extended(self, candidate: Candidate, count: int) -> list[Trial]:
        """Returns figures of the first batches, up to one in which a configuration does not fit.

        The first batch is simulated whole, unless that takes minutes. The time of each other batch
        is that of its part, times what the first one's part is off; breakdowns are those of parts.

        Args:
            candidate: configuration for which a part stood.
            count: number of batches.
        """
        first, parts = self._first, self._of_batches(candidate, self.batches[:count])
        fits = [part.fits for part in parts]
        if not all(fits):
            return parts[: fits.index(False) + 1]
        part = first.broken_down(candidate)
        if first.takes_minutes(candidate):
            return [part, *parts[1:]]
        (whole,) = self.evaluate([candidate], 1)[candidate]
        usable = self.workload.cluster.usable_bytes
        others = parts[1:] if whole.fits else []
        if part.parts is not None:
            whole = replace(whole, parts=part.parts.scaled(whole.seconds / part.seconds))
        return [whole, *(each.scaled(whole, parts[0], usable) for each in others)]

    def not_too_large(self, some: Sequence[Candidate]) -> list[Candidate]:
        """Returns the other ones than `too_large` does."""
        large = self.too_large(some)
        return [each for each in some if each not in large]

    def with_room(self, best: Candidate) -> Candidate:
        """Returns the configuration, or it with a few more micro-batches if few parts tell that it
        does not fit in some batch: nor would most of its variants."""
        if not self.have_few_parts([best]):
            return best
        tried = (best, *with_a_few_more_micro_batches(best, self.workload))
        able = (c for c in tried if not self.too_large([c]) and self._fits_in_all_batches(c))
        return next(able, best)

    def too_large(self, some: Sequence[Candidate]) -> list[Candidate]:
        """Returns the configurations that are known by a few parts not to fit."""
        for bounds in self.batches:
            able = [*filter(has_few_parts, some)]
            unknown = [each for each in able if not bounds.holds_no_document(each)]
            bounds.prepare(largest_micro_batch, unknown)
        usable = self.workload.cluster.usable_bytes
        return [c for c in some if max(b.least_memory(c) for b in self.batches) > usable]

    def best(self, some: Sequence[Candidate], worth_it: float) -> Candidate | None:
        """Returns the first of configurations that fits and takes about as little as the others:
        the best so far, or a variant of it; None: no part stands for all of them.

        Args:
            some: the best so far, and variants of it.
            worth_it: ratio of seconds up to which they count as equally fast.
        """
        if self.have_few_parts(some):
            return self._of_few_parts(some, worth_it)
        if self.have_many_ticks(some):
            return self._of_ticks(some, worth_it)
        return None

    def _of_few_parts(self, some: Sequence[Candidate], worth_it: float) -> Candidate:
        fit = [some[0], *self.not_too_large(some[1:])]
        self._first.prepare(few_parts, fit)
        # Several micro-batches in flight take more than the largest one.
        fit = [some[0], *(each for each in fit[1:] if self._first.stand_in(each).fits)]
        seconds = {each: self._first.stand_in(each).seconds for each in fit}
        return self._first_of(seconds, worth_it, self._fits_in_all_batches)

    def _of_ticks(self, some: Sequence[Candidate], worth_it: float) -> Candidate:
        self._first.prepare(glance, some)
        seconds = {each: self._first.promised(each) or np.inf for each in some}
        return self._first_of(seconds, worth_it, lambda each: self.trial(each).fits)

    @staticmethod
    def _first_of(
        seconds: Mapping[Candidate, float], worth_it: float, fits: Callable[[Candidate], bool]
    ) -> Candidate:
        """Returns the first configuration that is about as fast as the fastest and fits; that at
        the front does, or no other can take its place."""
        left, front = dict(seconds), next(iter(seconds))
        while len(left) > 1:
            least = min(left.values())
            best = next(each for each in left if left[each] <= worth_it * least)
            if best == front or fits(best):
                return best
            del left[best]
        return front

    def _fits_in_all_batches(self, candidate: Candidate) -> bool:
        return all(part.fits for part in self._of_batches(candidate, self.batches))

    @staticmethod
    def _of_batches(candidate: Candidate, batches: Sequence[Bounds]) -> list[Trial]:
        """Returns the figures of a configuration's part in each batch."""
        with ThreadPoolExecutor(len(batches)) as threads:
            return list(threads.map(lambda bounds: bounds.stand_in(candidate), batches))
