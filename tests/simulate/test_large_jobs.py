"""Searches of large jobs: a few server pools, or a few micro-batches, stand for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distca.cost.model_sizes import MODELS
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.plan.span import Int64s
from distca.simulate import (
    CLUSTERS,
    PUBLISHED,
    Candidate,
    Workload,
    advise,
    candidates,
    few_parts,
    pack_sequences,
    simulate,
)
from distca.simulate import bounds as simulated_bounds
from distca.simulate.bounds import Bounds
from distca.simulate.effort import Effort
from distca.simulate.outcome import Outcome
from distca.simulate.search import _Search
from distca.simulate.stand_ins import StandIns
from distca.simulate.trials import Trial, Trials
from support.simulated_jobs import JOB, JOBS, batch

MANY_POOLS = Workload(
    MODELS["llama-8b"],
    replace(CLUSTERS["dgx-h200"], charges=PUBLISHED),
    gpus=128,
    context=32_768,
    sequences=32,
    tolerance=0.05,
)
"""A job whose server pools can be many."""


def many_documents(seed: int = 0) -> list[Int64s]:
    """Lengths of the documents in each of that job's sequences, int64."""
    sequences, context = MANY_POOLS.sequences, MANY_POOLS.context
    lengths = draw(DISTRIBUTIONS["pretrain"], sequences * context, seed)
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
        (best,) = search.next_best()
        assert best in pools
        assert best == min(pools, key=bounds[0].seconds)
        # Those that do not run are known by a few of their pools.
        assert {*search.trials} == {plain, *pools}
        assert search.in_all_batches(best) == best
    assert ran == [(plain, False), (best, False)]
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
        return next(iter(search.next_best()), None)

    # Of a size the one with the fewest micro-batches runs, in pools.
    few = replace(others[1], pool_size=2)
    assert best([slow, *others]) == few
    assert {*ran} == {slow, few}
    # None runs whose bound without pools is above what is known.
    ran.clear()
    known[slow] = 0.5 * min(map(bounds[0].seconds, others))
    assert best([slow, *others]) == slow
    assert {*ran} == {slow}


def test_parts_tell_how_long_other_batches_take() -> None:
    """The first batch is simulated whole, and parts of the others come within 2%, a
    quarter of them here."""
    workload = MANY_POOLS
    batches = [many_documents(seed) for seed in range(3)]
    pools = Candidate("tiles", 2, 1, 64, 1, 2, pool_size=8)
    with Trials(workload, batches) as trials:
        bounds = [Bounds(workload, each) for each in batches]
        found = StandIns(workload, trials.first, True, bounds).extended(pools, 3)
        assert len(trials.first([pools], 1)[pools]) == 1
        whole = trials.first([pools], 3)[pools]
    assert found[0].seconds == whole[0].seconds
    assert [each.from_part for each in found] == [False, True, True]
    for ours, theirs in zip(found, whole, strict=True):
        assert ours.fits
        assert ours.tokens == theirs.tokens
        assert ours.seconds == pytest.approx(theirs.seconds, rel=0.02)
        assert ours.memory_gb == pytest.approx(theirs.memory_gb, rel=0.05)
        assert ours.idle == pytest.approx(theirs.idle, abs=0.02)


def test_a_document_that_fits_no_pool_is_found_without_a_plan() -> None:
    """And no number of micro-batches is tried to make it fit."""
    documents = many_documents()
    small = replace(MANY_POOLS, cluster=replace(MANY_POOLS.cluster, memory_gb=45.0))
    plain = Candidate("tiles", 2, 1, 64, 1, 2)
    pools = [replace(plain, pool_size=size) for size in (1, 8)]
    one, eight = pools

    def no_parts(*_: object) -> list[Outcome]:
        raise AssertionError("a plan was made")

    bounds = Bounds(small, documents, no_parts)
    assert bounds.holds_no_document(one)
    assert not bounds.holds_no_document(eight)
    assert bounds.least_memory(one) > small.cluster.usable_bytes
    assert bounds.least_memory(one) <= simulate(one, small, documents).memory_bytes.max()
    ran: list[Candidate] = []
    tried = StandIns(small, Trials(small, [documents]).first, True, [Bounds(small, documents)])
    assert one in tried.too_large([one, eight])

    def evaluate(
        some: Sequence[Candidate], count: int, *, parts: bool = False
    ) -> dict[Candidate, list[Trial]]:
        return {each: [Trial(True, 1e6, 1, 1.0, 0.0, 0.0)] * count for each in some}

    effort = Effort(1, 1, 1, 1, lambda *_: [one])
    search = _Search(small, [documents], evaluate, effort, [plain], [Bounds(small, documents)])
    assert search.next_best() == [plain]
    ran += [each for each in search.trials if each.pool_size is not None]
    assert ran == []


MANY_TICKS = replace(JOB, sequences=96)
"""A job whose micro-batches can be many."""


@pytest.mark.parametrize(("stages", "micro_batches", "chain"), [(2, 32, 1), (1, 48, 1), (2, 96, 2)])
def test_some_micro_batches_tell_how_long_all_take(
    stages: int, micro_batches: int, chain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ticks of a small job, whose micro-batches vary, are within 15%, and so is a sample that
    goes on like these; it has little more memory than all."""
    monkeypatch.setattr(simulated_bounds, "_LARGE", 1)
    monkeypatch.setattr(few_parts, "_LARGE", 1 << 20)
    documents = batch(0, sequences=96)
    bounds = Bounds(MANY_TICKS, documents)
    many = Candidate("tiles", 1, stages, 8 // stages, 1, micro_batches, chain=chain)
    whole = Trial.run(many, MANY_TICKS, documents)
    assert 0.85 < bounds.promised(many) / whole.seconds < 1.15
    stand_in = bounds.broken_down(many)
    assert 0.85 < stand_in.seconds / whole.seconds < 1.15
    assert stand_in.tokens == whole.tokens
    assert stand_in.parts is not None
    assert stand_in.parts.seconds == pytest.approx(stand_in.seconds)
    assert 0.9 < stand_in.memory_gb / whole.memory_gb < 1.01
    few = replace(many, micro_batches=2 * stages * chain)
    assert not bounds.stands_in(few)
    assert bounds.promised(few) == 0.0
    assert not bounds.takes_minutes(many)
    assert bounds.promised(replace(many, pool_size=2)) == 0.0


@pytest.mark.parametrize(
    ("stages", "micro_batches", "pool_size", "wide", "within"),
    [
        (1, 32, None, None, 0.01),
        (1, 32, 2, None, 0.04),
        (1, 29, 4, 4096, 0.04),
        (2, 32, 2, None, 0.04),
    ],
)
def test_a_few_parts_tell_how_long_an_iteration_takes(
    stages: int,
    micro_batches: int,
    pool_size: int | None,
    wide: int | None,
    within: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And how much memory it needs, and what its time is spent on."""
    monkeypatch.setattr(few_parts, "_LARGE", 1)
    documents = batch(0, sequences=96)
    bounds = Bounds(MANY_TICKS, documents)
    many = Candidate(
        "tiles", 1, stages, 8 // stages, 1, micro_batches, pool_size=pool_size, wide_documents=wide
    )
    assert few_parts.has_few_parts(many)
    whole, stand_in = Trial.run(many, MANY_TICKS, documents), bounds.broken_down(many)
    assert stand_in.seconds == pytest.approx(whole.seconds, rel=within)
    assert stand_in.memory_gb == pytest.approx(whole.memory_gb, rel=0.1)
    assert stand_in.tokens == whole.tokens
    assert stand_in.idle == pytest.approx(whole.idle, abs=0.1)
    assert stand_in.parts is not None
    assert stand_in.parts.seconds == pytest.approx(stand_in.seconds)
    assert sum(stand_in.parts.as_shown().values()) == pytest.approx(stand_in.seconds)
    assert not few_parts.has_few_parts(replace(many, micro_batches=2))
    assert few_parts.has_few_parts(replace(many, pool_size=None)) == (stages == 1)


def test_the_best_has_room_in_all_batches_before_its_variants_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variants of what does not fit in a later batch would not fit there, either."""
    monkeypatch.setattr(few_parts, "_LARGE", 1)
    many = Candidate("tiles", 1, 1, 8, 1, 16, pool_size=4)
    documents = [batch(n, sequences=96) for n in (0, 1)]
    needed = [Bounds(MANY_TICKS, each).stand_in(many).memory_gb for each in documents]
    # The batch that needs more memory is the second one.
    documents = documents if needed[0] < needed[1] else documents[::-1]
    for share, micro_batches in ((1.01, {16}), (0.99, {17, 19})):
        usable = share * max(needed)
        cluster = replace(MANY_TICKS.cluster, memory_gb=usable, reserved_gb=0.0)
        small = replace(MANY_TICKS, cluster=cluster)
        all_batches = [Bounds(small, each) for each in documents]
        stand_ins = StandIns(small, lambda some, count, **_: {}, True, all_batches)
        chosen = stand_ins.with_room(many)
        assert chosen.micro_batches in micro_batches
        assert all(bounds.stand_in(chosen).fits for bounds in all_batches)
    # Where no part stands for it, it stays.
    alone = StandIns(small, lambda some, count, **_: {}, False, all_batches)
    assert alone.with_room(many) == many


def test_what_a_few_parts_chose_is_held_against_what_runs_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next variants of a configuration that has not run may be others than parts stand for."""
    monkeypatch.setattr(few_parts, "_LARGE", 1)
    documents = batch(0, sequences=96)
    bounds = [Bounds(MANY_TICKS, documents)]
    slow = Candidate("tiles", 1, 1, 8, 1, 96)
    fast, short = replace(slow, micro_batches=48), replace(slow, micro_batches=12)
    assert few_parts.has_few_parts(fast)
    assert not few_parts.has_few_parts(short)
    sweeps = [(lambda best, _: [fast], 1.0), (lambda best, _: [short], 1.0)]
    with Trials(MANY_TICKS, [documents]) as trials:
        effort = Effort(1, 1, 1, 1, lambda *_: [], sweeps)
        search = _Search(MANY_TICKS, [documents], trials.first, effort, [slow], bounds)
        (best,) = search.next_best()
        assert best == slow
        seconds = {each: simulate(each, MANY_TICKS, documents).seconds for each in (fast, short)}
        assert search.sweep(best) == min(seconds, key=lambda each: seconds[each])


def test_ticks_stand_for_all_of_those_that_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the end, too: nothing runs whole."""
    monkeypatch.setattr(simulated_bounds, "_LARGE", 1)
    many = Candidate("tiles", 1, 2, 4, 1, 32)
    batches = [batch(seed, sequences=96) for seed in range(2)]
    bounds = [Bounds(MANY_TICKS, each) for each in batches]
    ran: list[Candidate] = []
    with Trials(MANY_TICKS, batches) as trials:

        def evaluate(
            some: Sequence[Candidate], count: int, *, parts: bool = False
        ) -> dict[Candidate, list[Trial]]:
            ran.extend(some)
            return trials.first(some, count, parts=parts)

        stand_ins = StandIns(MANY_TICKS, evaluate, True, bounds)
        first, second = stand_ins.extended(many, 2)
        assert ran == [many]
        assert len(trials.first([many], 1)[many]) == 1
        whole = trials.first([many], 2)[many]
        assert first == replace(whole[0], parts=first.parts)
        assert first.parts is not None
        assert first.parts.seconds == pytest.approx(first.seconds)
        assert second.seconds == pytest.approx(whole[1].seconds, rel=0.1)
        assert second.from_part
        monkeypatch.setattr(simulated_bounds, "_MINUTES", 1)
        first, second = stand_ins.extended(many, 2)
        assert ran == [many]
    assert first == bounds[0].broken_down(many)
    assert first.from_part
    assert second == bounds[1].stand_in(many)


def test_whole_iterations_are_simulated_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the best configuration in all batches, even if parts alone chose it."""
    monkeypatch.setattr(few_parts, "_LARGE", 1)
    many = Candidate("tiles", 1, 1, 8, 1, 48)
    batches = [batch(seed, sequences=96) for seed in range(2)]
    bounds = [Bounds(MANY_TICKS, each) for each in batches]
    assert few_parts.has_few_parts(many)
    for asked in (False, True):
        effort = Effort(1, 1, whole_iterations=asked)
        with Trials(MANY_TICKS, batches) as trials:
            search = _Search(
                *(MANY_TICKS, batches, trials.first, effort, [], bounds[:1]), later=bounds[1:]
            )
            search._run([many], 1)
            assert search.trials[many][0].from_part
            assert search.in_all_batches(many) == many
            found = search.trials[many]
            assert [each.from_part for each in found] == [False, not asked]
            whole = trials.first([many], 2)[many]
        assert (found[1].seconds == whole[1].seconds) == asked


def test_a_search_goes_by_two_of_many_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What promises more than another takes does not run, nor do variants but the best one."""
    documents = batch(0, sequences=96)
    fast, slow, full = (Candidate("tiles", 1, 2, 4, 1, each) for each in (48, 96, 32))
    variants = [replace(fast, tolerance=each) for each in (0.02, 0.1, 0.2)]
    known = {fast: 10.0, slow: 12.0, full: 8.0}
    known.update(zip(variants, (9.0, 8.0, 7.0), strict=True))

    class Known(Bounds):
        def promised(self, candidate: Candidate) -> float:
            return known.get(candidate, 20.0)

        def prepare(self, *_: object) -> None:
            pass

        def stand_in(self, candidate: Candidate) -> Trial:
            stood.append(candidate)
            fits = candidate not in (full, variants[2])
            return Trial(fits, self.promised(candidate), 1, 1.0, 0.0, 0.0)

        def broken_down(self, candidate: Candidate) -> Trial:
            return self.stand_in(candidate)

    monkeypatch.setattr(simulated_bounds, "_LARGE", 1)
    ran: list[Candidate] = []
    stood: list[Candidate] = []

    def evaluate(
        some: Sequence[Candidate], count: int, *, parts: bool = False
    ) -> dict[Candidate, list[Trial]]:
        ran.extend(some)
        return {each: [Trial(True, known[each], 1, 1.0, 0.0, 0.0)] * count for each in some}

    sweeps = [(lambda best, _: variants, 1.0)]
    effort = Effort(1, 1, 1, 3, lambda *_: [], sweeps)
    bounds = [Known(MANY_TICKS, documents)]
    search = _Search(MANY_TICKS, [documents], evaluate, effort, [slow, full, fast], bounds)
    (best,) = search.next_best()
    assert best == fast
    # The slow one is left out once the fast one is known to fit.
    assert slow not in stood
    assert not search.trials[full][0].fits
    best = search.sweep(best)
    assert best == variants[1]
    assert ran == []
    assert search.in_all_batches(best) == best
    assert ran == [best]


@pytest.mark.parametrize("job", ["charged", "slow links"])
def test_the_search_of_large_jobs_finds_what_an_exhaustive_one_finds(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By parts of iterations: its best takes at most 1% longer in the first batch."""
    monkeypatch.setattr(simulated_bounds, "_LARGE", 1)
    workload = replace(JOBS[job], sequences=96)
    documents = batch(0, sequences=96)
    (choice,) = advise(workload, [documents], ["tiles"], [1], [1, 2])
    every = {
        candidate: simulate(candidate, workload, documents)
        for candidate in candidates("tiles", workload, [1], [1, 2])
    }
    best = min(outcome.seconds for outcome in every.values() if outcome.fits)
    assert choice.candidate is not None
    assert choice.seconds == simulate(choice.candidate, workload, documents).seconds
    assert choice.seconds < 1.01 * best
