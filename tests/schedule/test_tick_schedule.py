"""Tick schedules: what depends on what, how many ticks, how much is in flight; and shared ticks."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.plan import Mask, validate_plan
from distca.schedule import (
    SCHEDULERS,
    NanoPlan,
    ScheduleConfig,
    TickSchedule,
    Work,
    join_stages,
    make_scheduler,
    most_in_flight_of_1f1b,
    tick_schedule,
)
from support.random_plans import random_lengths

SIZES = st.tuples(st.integers(1, 24), st.integers(1, 8), st.integers(1, 4))


def check(schedule: TickSchedule, forward_only: bool = False) -> None:
    """Every pass once, and after what it needs; recounts what is in flight."""
    stages, chunks = schedule.stages, schedule.chunks
    done: set[tuple[str, int, Work]] = set()
    in_flight, most = Counter(), [0] * stages
    for tick in schedule.ticks:
        assert len(tick.work) == stages
        assert any(tick.work), "a tick in which no stage works"
        made = set()
        for stage, work in enumerate(tick.work):
            if work is None:
                continue
            assert (tick.direction, stage, work) not in done
            later = work._replace(micro_batch=work.micro_batch + 1)
            if work.micro_batch % schedule.chain != schedule.chain - 1 and (
                later.micro_batch < schedule.micro_batches
            ):
                # Its keys are needed later, and their gradients come from there.
                assert (("backward", stage, later) in done) == (tick.direction == "backward")
                assert (("forward", stage, later) in done) == (tick.direction == "backward")
            if tick.direction == "forward":
                in_flight[stage] += 1
                needs = ("forward", stage - 1, work)
                if stage == 0:
                    needs = ("forward", stages - 1, Work(work.micro_batch, work.chunk - 1))
                first = stage == 0 and work.chunk == 0
            else:
                assert ("forward", stage, work) in done
                in_flight[stage] -= 1
                needs = ("backward", stage + 1, work)
                if stage == stages - 1:
                    needs = ("backward", 0, Work(work.micro_batch, work.chunk + 1))
                first = stage == stages - 1 and work.chunk == chunks - 1
            assert first or needs in done, (tick, work)
            made.add((tick.direction, stage, work))
            most[stage] = max(most[stage], in_flight[stage])
        done |= made
    phases = 1 if forward_only else 2
    assert len(done) == phases * stages * chunks * schedule.micro_batches
    assert schedule.most_in_flight == tuple(most)


@given(SIZES)
def test_fewest_ticks(sizes: tuple[int, int, int]) -> None:
    micro_batches, stages, chunks = sizes
    schedule = tick_schedule(*sizes)
    check(schedule)
    waits = max(stages - micro_batches, 0) * (chunks - 1)
    assert len(schedule.ticks) == 2 * (micro_batches * chunks + stages - 1 + waits)
    usual = most_in_flight_of_1f1b(*sizes)
    if chunks == 1:
        assert schedule.most_in_flight == tuple(
            min(micro_batches, 2 * (stages - stage) - 1) for stage in range(stages)
        )
    elif micro_batches % stages == 0 or stages == 1:
        # Interleaved 1F1B needs micro-batches that divide.
        assert max(schedule.most_in_flight) <= max(max(usual), chunks)


@given(SIZES, st.integers(2, 5), st.sampled_from([None, 0, 3]))
def test_chains(sizes: tuple[int, int, int], chain: int, more: int | None) -> None:
    micro_batches, stages, chunks = sizes
    bound = None if more is None else chain + more
    schedule = tick_schedule(*sizes, bound, chain=chain)
    check(schedule)
    if bound is not None:
        assert max(schedule.most_in_flight) <= bound * chunks
        with pytest.raises(ValueError, match=f"a chain of {bound + 1} needs as many"):
            tick_schedule(bound + 1, stages, chunks, bound, chain=bound + 1)
    elif chunks == 1:
        assert len(schedule.ticks) == len(tick_schedule(*sizes).ticks)
        assert all(
            most <= min(micro_batches, 2 * (stages - stage - 1) + chain)
            for stage, most in enumerate(schedule.most_in_flight)
        )


@given(SIZES)
def test_evaluations(sizes: tuple[int, int, int]) -> None:
    schedule = tick_schedule(*sizes, forward_only=True)
    check(schedule, forward_only=True)
    assert len(schedule.ticks) == len(tick_schedule(*sizes).ticks) // 2


@given(SIZES, st.integers(1, 12))
def test_a_bound_on_what_is_in_flight(sizes: tuple[int, int, int], bound: int) -> None:
    schedule, free = tick_schedule(*sizes, max_in_flight=bound), tick_schedule(*sizes)
    check(schedule)
    assert max(schedule.most_in_flight) <= bound * schedule.chunks
    assert len(schedule.ticks) >= len(free.ticks)
    if max(free.most_in_flight) <= bound * schedule.chunks:
        assert len(schedule.ticks) == len(free.ticks)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_no_schedule_is_shorter_or_keeps_less(micro_batches: int, stages: int) -> None:
    """Against all orders of phases, and all subsets of stages that work in a tick."""
    for bound in (1, 2, 3, None):
        found = tick_schedule(micro_batches, stages, max_in_flight=bound)
        fewest, least = _by_exhaustion(micro_batches, stages, bound)
        assert len(found.ticks) == fewest
        if bound is None:
            assert found.most_in_flight in least
            assert all(sum(found.most_in_flight) <= sum(other) for other in least)


def _by_exhaustion(
    micro_batches: int, stages: int, bound: int | None
) -> tuple[int, set[tuple[int, ...]]]:
    """The fewest ticks, and the peaks in flight of the schedules with so few."""
    start = ((0,) * stages, (0,) * stages, (0,) * stages)
    reached, ticks = {start}, 0
    while True:
        finished = {most for _, b, most in reached if min(b) == micro_batches}
        if finished:
            return ticks, finished
        following = set()
        for f, b, most in reached:
            forward = [
                s
                for s in range(stages)
                if f[s] < (micro_batches if s == 0 else f[s - 1])
                and (bound is None or f[s] - b[s] < bound)
            ]
            backward = [s for s in range(stages) if b[s] < (f[s] if s == stages - 1 else b[s + 1])]
            for able, ahead in ((forward, True), (backward, False)):
                for count in range(1, len(able) + 1):
                    for chosen in itertools.combinations(able, count):
                        more = tuple(int(s in chosen) for s in range(stages))
                        nf = tuple(x + y for x, y in zip(f, more, strict=True)) if ahead else f
                        nb = b if ahead else tuple(x + y for x, y in zip(b, more, strict=True))
                        peak = tuple(max(p, x - y) for p, x, y in zip(most, nf, nb, strict=True))
                        following.add((nf, nb, peak))
        reached, ticks = following, ticks + 1


def test_long_schedules_are_found_quickly() -> None:
    schedule = tick_schedule(256, 16, max_in_flight=20)
    check(schedule)
    assert max(schedule.most_in_flight) <= 20
    # Twenty in flight at a time, where a round trip takes 2 * 16 ticks at least.
    assert len(schedule.ticks) < 800


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1), "0 micro-batches"),
        ((1, 0), "0 pipeline stages"),
        ((1, 1, 0), "0 model chunks"),
        ((1, 1, 1, 0), "0 micro-batches in flight"),
        ((1, 1, 1, None, False, 0), "0 micro-batches in a chain"),
    ],
)
def test_sizes_must_be_positive(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tick_schedule(*sizes)


@given(st.data(), st.sampled_from(list(SCHEDULERS)), st.booleans())
def test_pooled_plans_are_valid(data: st.DataObject, name: str, pooled: bool) -> None:
    """Of stages with micro-batches of their own, or none; servers in any order."""
    ranks, stages = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    idle = data.draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    if all(idle):
        idle[0] = False
    scheduler = make_scheduler(name, ScheduleConfig())
    tokens = data.draw(st.integers(1, 500))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    capacities = np.full(ranks, tokens)
    plans = [
        None if none else scheduler.plan(random_lengths(rng, ranks * tokens), capacities, Mask())
        for none in idle
    ]
    order = data.draw(st.permutations(range(ranks * stages)))
    servers = np.array(order, dtype=np.int64).reshape(stages, ranks)
    stages_plans = [None if own is None else NanoPlan(own) for own in plans]
    plan = join_stages(stages_plans, servers, scheduler if pooled else None)
    validate_plan(plan)
    assert plan.world_size == servers.size or stages == 1
    tokens = plan.placement.tokens_per_rank()
    loads = plan.loads()
    for stage, own in enumerate(plans):
        if own is None:
            assert not tokens[servers[stage]].any()
            assert pooled or not loads[servers[stage]].any()
        elif stages > 1:
            assert (tokens[servers[stage]] == own.placement.tokens_per_rank()).all()
            assert pooled or (loads[servers[stage]] == own.loads()).all()


def test_idle_servers_are_used() -> None:
    """One long document on one stage of four: all stages' servers compute it."""
    scheduler = make_scheduler("tiles", ScheduleConfig())
    own = scheduler.plan(np.array([16_384]), np.array([8192, 8192]), Mask())
    servers = np.arange(8).reshape(4, 2)
    plan = join_stages([None, NanoPlan(own), None, None], servers, scheduler)
    loads = plan.loads()
    assert loads.max() <= 1.1 * loads.mean()
    assert (loads > 0).all()
