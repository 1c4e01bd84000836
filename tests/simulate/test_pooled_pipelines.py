"""Pipelines whose ranks are one server pool: micro-batches of any number, and what they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distca.simulate import Candidate, Workload, advise, few_parts, simulate
from distca.simulate.advice import Extent
from distca.simulate.bounds import Bounds
from distca.simulate.effort import Effort
from distca.simulate.search import _Search
from distca.simulate.space import estimate, least_memory, pooled_pipelines
from distca.simulate.stand_ins import StandIns
from distca.simulate.trials import Trial, Trials
from support.simulated_jobs import JOB, JOBS, batch


def with_memory(job: Workload, usable_gb: float) -> Workload:
    memory = usable_gb + job.cluster.reserved_gb
    return replace(job, cluster=replace(job.cluster, memory_gb=memory))


def test_their_micro_batches_are_as_large_as_may_fit() -> None:
    sizes = [1, 2], [1, 2, 4]
    every = pooled_pipelines("tiles", JOB, *sizes)
    assert {(each.tensor, each.stages, each.data) for each in every} == {
        *((1, 2, 4), (1, 4, 2), (2, 2, 2))
    }
    assert all(each.pool_size == each.data for each in every)
    # Of each the two largest: a sequence, and a little less.
    assert [c.micro_batches for c in every if c.stages == 2 and c.tensor == 1] == [4, 5]
    most = max(least_memory(each, JOB) for each in every if each.micro_batches == 4)
    small = with_memory(JOB, most / 1e9 - 1e-3)
    fewer = pooled_pipelines("tiles", small, *sizes)
    assert fewer != every
    assert all(least_memory(each, small) <= small.cluster.usable_bytes for each in fewer)
    assert pooled_pipelines("tiles", JOBS["experts"], *sizes) == []
    assert pooled_pipelines("greedy", JOB, *sizes) == []


def test_a_search_tries_them_beside_its_best() -> None:
    """With other parallel sizes than the best one has; what is chosen runs, and is the fastest."""
    documents, sizes = batch(0), ([1, 2], [1, 2])
    (variants, worth_it), *_ = Extent(*sizes).effort("tiles", JOB, 1).sweeps
    assert worth_it == 1.0
    every = variants(Candidate("tiles", 1, 1, 8, 1, 4), JOB)
    assert every == pooled_pipelines("tiles", JOB, *sizes)
    (choice,) = advise(JOB, [documents], ["tiles"], *sizes)
    known = [simulate(each, JOB, documents) for each in every]
    assert choice.seconds <= min(outcome.seconds for outcome in known if outcome.fits)


def test_parts_that_do_not_fit_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest micro-batch alone fits, several in flight do not; in one batch or another."""
    monkeypatch.setattr(few_parts, "_LARGE", 1)
    job = replace(JOB, sequences=96)
    batches = [batch(seed, sequences=96) for seed in range(2)]
    slow = Candidate("tiles", 1, 2, 4, 1, 96, pool_size=4, max_in_flight=2)
    fast = replace(slow, micro_batches=48, max_in_flight=None)
    bounds = [Bounds(job, each) for each in batches]
    needed = [each.stand_in(fast).memory_gb for each in bounds]
    taken = max(each.stand_in(slow).memory_gb for each in bounds)
    assert bounds[0].stand_in(fast).seconds < bounds[0].stand_in(slow).seconds
    assert taken < min(needed) != max(needed)

    def best(gb: float) -> Candidate | None:
        small = with_memory(job, gb)
        some = [Bounds(small, each) for each in batches]
        return StandIns(small, Trials(small, batches).first, True, some).best([slow, fast], 1.0)

    assert best(1.001 * max(needed)) == fast
    # The second batch alone needs more, or both do.
    assert best((min(needed) + max(needed)) / 2) == slow
    assert best(max(taken, 0.9 * min(needed))) == slow


def test_what_needs_more_than_its_parts_has_a_few_more_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(few_parts, "_LARGE", 1)
    job, documents = replace(JOB, sequences=96), batch(0, sequences=96)
    other = Candidate("tiles", 1, 1, 8, 1, 96)
    chosen = replace(other, stages=2, data=4, micro_batches=100, pool_size=4)
    ran: list[int] = []

    def evaluate(
        some: Sequence[Candidate], count: int, *, parts: bool = False
    ) -> dict[Candidate, list[Trial]]:
        ran.extend(each.micro_batches for each in some)
        fits = {each: each.micro_batches > 110 for each in some}
        return {each: [Trial(fits[each], 1.0, 1, 1.0, 0.0, 0.0)] * count for each in some}

    bounds = [Bounds(job, documents)]
    search = _Search(job, [documents], evaluate, Effort(1, 1), [other], bounds)
    search.trials[other] = [Trial(True, 2.0, 1, 1.0, 0.0, 0.0)]
    assert search.in_all_batches(chosen) == replace(chosen, micro_batches=117)
    assert ran[:3] == [100, 108, 117]


def test_pipelines_that_cannot_be_as_fast_do_not_run() -> None:
    """Not even in parts: an ideal iteration of theirs takes longer than the best one."""
    documents = batch(0)
    best = Candidate("tiles", 2, 1, 4, 1, 4)
    # A pipeline of four stages is idle for most of as many micro-batches.
    able, idle = (
        Candidate("tiles", 1, stages, 8 // stages, 1, 4, pool_size=8 // stages) for stages in (2, 4)
    )
    ideal = {each: estimate(each, JOB, documents) for each in (able, idle)}
    known = {best: 0.99 * ideal[idle], able: ideal[able]}
    assert Bounds(JOB, documents).seconds(idle) < known[best]
    assert known[able] < known[best]
    ran: list[Candidate] = []

    def evaluate(
        some: Sequence[Candidate], count: int, *, parts: bool = False
    ) -> dict[Candidate, list[Trial]]:
        ran.extend(some)
        return {each: [Trial(True, known[each], 1, 1.0, 0.0, 0.0)] * count for each in some}

    effort = Effort(1, 1, 1, 1, None, [(lambda *_: [able, idle], 1.0)])
    search = _Search(JOB, [documents], evaluate, effort, [best], [Bounds(JOB, documents)])
    assert search.sweep(*search.next_best()) == able
    assert {*ran} == {best, able}
