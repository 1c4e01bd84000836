"""A bound of memory: more micro-batches where one would exceed it, with all documents once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.plan import validate_plan
from distca.schedule import (
    Documents,
    ExecutionOptions,
    GlobalBatchPlanner,
    LinearWork,
    MemoryBound,
    PlannedGlobalBatch,
    ScheduleConfig,
    StepMemory,
    documents_in_turn,
)
from distca.schedule.training.planned_batch import PADDING
from distca.simulate import simulate_ticks
from support.batches import long_tailed_lengths
from support.simulated import IDEAL, costs_on

RANKS, WINDOW = 8, 8 * 4096
COSTS = costs_on(IDEAL)
HALVES = replace(COSTS, head_parallel=2)
"""Two ranks share heads, and are one server."""


def planner(stages: int = 1, **changes: object) -> GlobalBatchPlanner:
    options = replace(ExecutionOptions(pool_size=2), **changes)  # type: ignore[arg-type]
    return GlobalBatchPlanner(
        np.arange(RANKS, dtype=np.int64).reshape(stages, -1),
        ScheduleConfig(tolerance=0.05, shape=COSTS.shape),
        options,
        linear_work=LinearWork(3000.0, 100.0),
        row_multiple=2,
    )


def bound(nbytes: float, **changes: object) -> MemoryBound:
    step = replace(StepMemory(COSTS, COSTS.shape), **changes)  # type: ignore[arg-type]
    return MemoryBound(nbytes, step, "--distca-memory-gb")


def incoming(seed: int, number: int = 2, longest: int = 12_000) -> list[Documents]:
    return documents_in_turn(
        [long_tailed_lengths(seed + n, WINDOW, 600, longest) for n in range(number)]
    )


def check_documents(planned: PlannedGlobalBatch, given: list[Documents]) -> None:
    """Plans are valid, and all tokens of the stream are in them once."""
    for tick in planned.ticks:
        for plan in tick.plans:
            validate_plan(plan)
    found = [
        np.arange(start, start + length)
        for each in planned.micro_batches
        for documents in each.documents
        for start, length in zip(documents.starts, documents.lengths, strict=True)
        if start != PADDING
    ]
    tokens = sum(int(each.lengths.sum()) for each in given)
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(tokens))


@pytest.mark.parametrize(
    ("stages", "changes", "step"),
    [
        (1, {}, {}),
        (1, {"ping_pong": False}, {"backward": "keep"}),
        (1, {"pool_size": RANKS}, {"costs": replace(COSTS, recompute="full")}),
        (1, {"wide_documents": 9000}, {}),
        (1, {"pool_size": 4}, {"costs": HALVES, "shape": HALVES.shape, "head_parallel": 2}),
        (2, {"pool_size": 1}, {"costs": replace(COSTS, recompute="mlp")}),
    ],
)
def test_no_micro_batch_is_above_the_bound(
    stages: int, changes: dict[str, object], step: dict[str, object]
) -> None:
    """By what the simulator says of the same plans."""
    made, unbound = planner(stages, **changes), bound(1e15, **step)
    for seed in range(3):
        given = incoming(7 * seed)
        whole, most = unbound.plan(made, given)
        assert len(whole.micro_batches) == len(given)
        lengths = np.array([12_000, (made.options.wide_documents or 2) - 1])
        alone = unbound.needed_alone(made, lengths)
        state = max(unbound.step.state_bytes(*made.servers.shape))
        for share in (0.75, 0.5):
            nbytes = max(state + share * (most - state), 1.02 * alone)
            if nbytes >= most:
                continue
            limited = replace(unbound, nbytes=nbytes)
            limited.check(made, lengths)
            planned, peak = limited.plan(made, given)
            assert peak <= nbytes
            assert len(planned.micro_batches) > len(given)
            costs, inputs = limited.step.costs, limited.step.backward
            outcome = simulate_ticks(planned, costs, backward=inputs)  # type: ignore[arg-type]
            assert outcome.memory_bytes.max() == peak
            check_documents(planned, given)


def test_it_takes_as_few_micro_batches_as_fit() -> None:
    (given,), made = incoming(0, number=1, longest=2000), planner()
    _, most = bound(1e15).plan(made, [given])
    state = COSTS.state_bytes(0, 1, RANKS)
    half = bound(state + 0.5 * (most - state))
    planned, peak = half.plan(made, [given])
    number = len(planned.micro_batches)
    assert number > 1
    for fewer in range(1, number):
        assert bound(1e15).plan(made, given.in_parts(fewer))[1] > half.nbytes >= peak


def test_what_fits_is_planned_as_without_a_bound() -> None:
    given, made = incoming(3), planner()
    found, peak = bound(1e15).plan(made, given)
    same, again = bound(peak).plan(made, given)
    assert again == peak
    for ours in (found, same):
        for mine, others in zip(ours.ticks, made.plan(given).ticks, strict=True):
            for each, other in zip(mine.plans, others.plans, strict=True):
                assert repr(each.tasks) == repr(other.tasks)


def batches(kind: str, number: int = 16) -> list[Documents]:
    """Two micro-batches: of documents of a length, or of a long-tailed distribution."""
    lengths = np.concatenate([each.lengths for each in incoming(0, number=1)])
    if kind != "long-tailed":
        lengths = np.full(number, int(kind))
    return documents_in_turn(np.array_split(lengths, 2))


@pytest.mark.parametrize("kind", ["12000", "8999", "long-tailed"])
@pytest.mark.parametrize("pool_size", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_what_passes_the_check_stays_within_the_bound(
    stages: int, pool_size: int, kind: str
) -> None:
    """With stages that hold several micro-batches, too; the bound is what the check just passes."""
    # A pool of four stages has up to 8 micro-batches then, and 7 in flight.
    made, given = planner(stages, pool_size=pool_size), batches(kind, 32 // max(stages, 2))
    lengths = np.concatenate([each.lengths for each in given])
    tight = bound(1.02 * bound(1e15).needed_alone(made, lengths))
    tight.check(made, lengths)
    planned, peak = tight.plan(made, given)
    assert peak <= tight.nbytes
    assert simulate_ticks(planned, COSTS).memory_bytes.max() == peak
    check_documents(planned, given)


def test_as_many_micro_batches_are_in_flight_as_fit() -> None:
    given = batches("12000")
    peaks = {}
    for most in (1, 2, 3):
        made = planner(2, pool_size=1, max_in_flight=most)
        peaks[most] = bound(1e15).plan(made, _joined_parts(given, 4))[1]
    assert peaks[1] < peaks[2] < peaks[3]
    free = planner(2, pool_size=1)
    for most in (2, 3):
        for nbytes in (peaks[most], 0.5 * (peaks[most] + peaks.get(most + 1, peaks[most]))):
            planned, peak = bound(nbytes).plan(free, given)
            assert max(planned.schedule.most_in_flight) == most
            assert peak <= nbytes
    # What a job's flag says stays a bound.
    planned, _ = bound(peaks[3]).plan(planner(2, pool_size=1, max_in_flight=2), given)
    assert max(planned.schedule.most_in_flight) == 2


def _joined_parts(given: list[Documents], number: int) -> list[Documents]:
    lengths = np.concatenate([each.lengths for each in given])
    return documents_in_turn(np.array_split(lengths, number))


def test_a_bound_below_the_least_says_what_to_do() -> None:
    made, given = planner(2, pool_size=1), batches("8999")
    lengths = np.concatenate([each.lengths for each in given])
    tiny = bound(0.9 * bound(1e15).needed_alone(made, lengths))
    planned, peak = tiny.plan(made, given)
    assert max(planned.schedule.most_in_flight) == 1
    assert peak > tiny.nbytes
    text = tiny.why_above(planned, peak)
    assert f"needs {peak / 1e6:,.2f} MB of a GPU" in text
    assert f"--distca-memory-gb allows {tiny.nbytes / 1e6:,.2f} MB" in text
    assert "in 4 micro-batches, at most 1 in flight, and neither more" in text
    with pytest.raises(ValueError, match=r"allows 10\.00 MB: share the model"):
        bound(1e7).check(made, lengths)


def test_the_longest_document_decides() -> None:
    made = planner()
    state = COSTS.state_bytes(0, 1, RANKS)
    needed = float(bound(1e15).step.peak(made.plan(documents_in_turn([np.array([12_000])]))).max())
    # Buffers of other pools may be a little larger.
    needed *= 1.02
    bound(needed).check(made, np.array([12_000]))
    with pytest.raises(ValueError, match=r"the longest document, of 12,000 tokens, needs") as error:
        bound(0.9 * needed).check(made, np.array([12_000]))
    text = str(error.value)
    assert f"{needed / 1e6:,.2f} MB" in text
    assert f"but --distca-memory-gb allows {0.9 * needed / 1e6:,.2f} MB" in text
    shorter = int(text.split("cut documents at ")[1].split(" tokens")[0].replace(",", ""))
    assert shorter > 9000
    bound(0.9 * needed).check(made, np.array([shorter]))
    with pytest.raises(ValueError, match="share the model among more GPUs"):
        bound(0.5 * state).check(made, np.array([12_000]))
    # A batch that cannot fit runs in the micro-batches that need least.
    given = incoming(0)
    limited = bound(0.9 * float(bound(1e15).plan(made, given)[1]))
    tiny = replace(limited, nbytes=state + 1)
    planned, peak = tiny.plan(made, given)
    assert peak > tiny.nbytes
    check_documents(planned, given)
