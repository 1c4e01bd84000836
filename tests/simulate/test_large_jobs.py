"""Searches of large jobs: a few server pools, or a few micro-batches, stand for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.plan.span import Int64s
from distca.simulate import CLUSTERS, PUBLISHED, Candidate, Workload, pack_sequences, simulate
from distca.simulate import bounds as simulated_bounds
from distca.simulate.bounds import Bounds, Sample
from distca.simulate.effort import Effort
from distca.simulate.outcome import Outcome
from distca.simulate.search import _Search
from distca.simulate.trials import Trial, Trials
from support.simulated_jobs import JOB, batch

MANY_POOLS = Workload(
    MODELS["llama-8b"],
    replace(CLUSTERS["dgx-h200"], charges=PUBLISHED),
    gpus=128,
    context=32_768,
    sequences=32,
    tolerance=0.05,
)
"""A job whose server pools can be many."""


def many_documents() -> list[Int64s]:
    """Lengths of the documents in each of that job's sequences, int64."""
    sequences, context = MANY_POOLS.sequences, MANY_POOLS.context
    lengths = draw(DISTRIBUTIONS["pretrain"], sequences * context, 0)
    return pack_sequences(lengths, sequences, context)


def test_an_iteration_of_a_few_pools_is_a_bound_of_all() -> None:
    """It is close, has at most the memory of all, and is simulated where pools are many."""
    workload, documents = MANY_POOLS, many_documents()
    bounds = Bounds(workload, documents)
    plain = Candidate("tiles", 2, 1, 64, 1, 2)
    assert bounds.least_memory(plain) == 0.0
    for pools in (replace(plain, pool_size=4), replace(plain, pool_size=8, keeps_inputs=True)):
        outcome = simulate(pools, workload, documents)
        least = 0.95 if pools.pool_size == 4 else 0.9
        # First by the largest micro-batch alone, which is no more than that of the iteration.
        of_one = bounds.least_memory(pools)
        assert least < bounds.seconds(pools) / outcome.seconds <= 1
        of_few = bounds.least_memory(pools)
        assert 0.95 * of_few < of_one <= of_few
        assert least < of_few / outcome.memory_bytes.max() <= 1
        # Sharing among all ranks says less.
        assert bounds.seconds(pools) > 1.01 * bounds.seconds(replace(pools, pool_size=None))


def test_a_few_pools_choose_where_one_batch_does() -> None:
    """Of configurations with many pools the best one alone runs all of them, and is broken down."""
    workload, documents = MANY_POOLS, many_documents()
    plain = Candidate("tiles", 2, 1, 64, 1, 2)
    pools = [replace(plain, pool_size=size) for size in (8, 4)]
    ran: list[tuple[Candidate, bool]] = []

    with Trials(workload, [documents]) as trials:

        def evaluate(
            some: Sequence[Candidate], count: int, *, parts: bool = False
        ) -> dict[Candidate, list[Trial]]:
            ran.extend((each, parts) for each in some)
            return trials.first(some, count, parts=parts)

        effort = Effort(2, 1, 1, 1, lambda *_: pools, [(lambda best, _: [*pools, best], 1.0)])
        bounds = [Bounds(workload, documents)]
        search = _Search(workload, [documents], evaluate, effort, [plain], bounds)
        best = search.next_best()
        assert best in pools
        assert best == min(pools, key=bounds[0].seconds)
        # Those that do not run are known by a few of their pools.
        assert {*search.trials} == {plain, *pools}
        assert search.in_all_batches(best) == best
    assert ran == [(plain, False), (best, True)]
    # One that ran with all its ranks is taken where all pools take longer than a few promised.
    (trial,) = search.trials[best]
    search.trials[plain] = [replace(search.trials[plain][0], seconds=0.99 * trial.seconds)]
    trials._found[plain] = [*search.trials[plain]]
    assert search.in_all_batches(best) == plain
    assert trial.tokens == workload.sequences * workload.context
    assert trial.seconds == simulate(best, workload, documents).seconds
    assert trial.parts is not None
    assert trial.parts.seconds == pytest.approx(trial.seconds)


def test_pools_of_other_sizes_are_tried_that_promise_least_without_pools() -> None:
    """The one configuration that is to fit is slow; one of the others is faster in pools."""
    documents = batch(0)
    slow = Candidate("tiles", 1, 2, 4, 1, 4)
    others = [Candidate("tiles", 2, 1, 4, 1, each) for each in (8, 2)]
    pools = [replace(each, pool_size=2) for each in others]
    bounds = [Bounds(JOB, documents)]
    known = {slow: 2 * max(map(bounds[0].seconds, [*others, *pools]))}
    ran: list[Candidate] = []

    def evaluate(
        some: Sequence[Candidate], count: int, *, parts: bool = False
    ) -> dict[Candidate, list[Trial]]:
        ran.extend(some)
        seconds = {each: known.get(each, 0.9 * known[slow]) for each in some}
        return {each: [Trial(True, seconds[each], 1, 1.0, 0.0, 0.0)] * count for each in some}

    def in_pools(candidate: Candidate, workload: Workload) -> list[Candidate]:
        return [replace(candidate, pool_size=2)] if candidate.stages == 1 else []

    def best(left: list[Candidate]) -> Candidate | None:
        search = _Search(JOB, [documents], evaluate, Effort(1, 1, 1, 1, in_pools), left, bounds)
        return search.next_best()

    # Of a size the one with the fewest micro-batches runs, in pools.
    few = replace(others[1], pool_size=2)
    assert best([slow, *others]) == few
    assert {*ran} == {slow, few}
    # None runs whose bound without pools is above what is known.
    ran.clear()
    known[slow] = 0.5 * min(map(bounds[0].seconds, others))
    assert best([slow, *others]) == slow
    assert {*ran} == {slow}


MANY_TICKS = replace(JOB, sequences=96)
"""A job whose micro-batches can be many."""


@pytest.mark.parametrize(("stages", "micro_batches", "chain"), [(2, 32, 1), (1, 48, 1), (2, 96, 2)])
def test_some_micro_batches_tell_how_long_all_take(
    stages: int, micro_batches: int, chain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small job's vary: they promise up to 14% more, with little more memory than all."""
    monkeypatch.setattr(simulated_bounds, "_LARGE", 1)
    documents = batch(0, sequences=96)
    bounds = Bounds(MANY_TICKS, documents)
    many = Candidate("tiles", 1, stages, 8 // stages, 1, micro_batches, chain=chain)
    sample, whole = bounds.sample(many), simulate(many, MANY_TICKS, documents)
    assert sample is not None
    assert 0.95 < sample.promised / whole.seconds < 1.15
    assert sample.least < sample.promised
    assert 0.9 < sample.outcome.memory_bytes.max() / whole.memory_bytes.max() < 1.01
    assert bounds.sample(replace(many, micro_batches=8 * stages * chain)) is None
    assert bounds.sample(replace(many, pool_size=2)) is None


def test_a_search_goes_by_samples_of_many_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What promises more than another takes does not run, nor do variants but the best one."""
    documents = batch(0, sequences=96)
    fast, slow, full = (Candidate("tiles", 1, 2, 4, 1, each) for each in (48, 96, 32))
    variants = [replace(fast, tolerance=each) for each in (0.02, 0.1, 0.2)]
    known = {fast: 10.0, slow: 12.0, full: 8.0}
    known.update(zip(variants, (9.0, 8.0, 7.0), strict=True))

    def promised(candidate: Candidate) -> float:
        return known.get(candidate, 20.0)

    class Sampled(Bounds):
        def sample(self, candidate: Candidate) -> Sample | None:
            fits = candidate not in (full, variants[2])
            memory = np.full(8, 1.0 if fits else 3.0)
            none = np.zeros(8)
            outcome = Outcome(1.0, 1, 8, memory, 2.0, none, none, none, {})
            return Sample(outcome, promised(candidate))

    monkeypatch.setattr(simulated_bounds, "_LARGE", 1)
    ran: list[Candidate] = []

    def evaluate(
        some: Sequence[Candidate], count: int, *, parts: bool = False
    ) -> dict[Candidate, list[Trial]]:
        ran.extend(some)
        return {each: [Trial(True, promised(each), 1, 1.0, 0.0, 0.0)] * count for each in some}

    sweeps = [(lambda best, _: variants, 1.0)]
    effort = Effort(1, 1, 1, 3, lambda *_: [], sweeps)
    bounds = [Sampled(MANY_TICKS, documents)]
    search = _Search(MANY_TICKS, [documents], evaluate, effort, [slow, full, fast], bounds)
    best = search.next_best()
    assert best == fast
    assert search.sweep(best) == variants[1]
    # The slow one promises no more than it takes at least: one that is out of memory never runs.
    assert set(ran) == {fast}
    assert not search.trials[full][0].fits
