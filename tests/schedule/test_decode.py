"""Decode steps by numbers of rows are the plans that are made of all pieces, however long."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.step_bytes import stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Plan, validate_stepped_plan
from distca.plan.span import Int64s
from distca.schedule.serving import held_after, nobody_holds, shard_evenly, step_plan
from distca.schedule.serving.decode import DecodeBatch, plan_decode
from distca.schedule.serving.holdings import Holdings

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16)


def keys_of_servers(plan: Plan) -> Int64s:
    """Keys that each server has for each document's queries, `[documents, ranks]`."""
    keys = np.zeros((len(plan.lengths), plan.world_size), dtype=np.int64)
    tasks = plan.tasks
    np.add.at(keys, (tasks.document, tasks.server), tasks.kv_end - tasks.kv_start)
    return keys


@settings(max_examples=30)
@given(st.data())
def test_decode_steps_are_the_plans_of_all_pieces(data: st.DataObject) -> None:
    """Prompts, turns and decoded tokens in any order; sequences come and go."""
    ranks, stripe = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    masks = [Mask(), Mask(data.draw(st.integers(0, 20)))]
    holdings, sequences = Holdings(ranks, stripe), [3, 8, 5, 4, 9, 7]
    held = {sequence: nobody_holds(ranks) for sequence in sequences}
    for _ in range(data.draw(st.integers(1, 8))):
        some = data.draw(st.lists(st.sampled_from(sequences), min_size=1, unique=True))
        if data.draw(st.integers(0, 9)) == 0:
            holdings.drop(some[0])
            held[some[0]] = nobody_holds(ranks)
        if data.draw(st.booleans()):
            starts = np.array([holdings.length(each) for each in some])
            counts = data.draw(st.lists(st.integers(1, 40), min_size=len(some), max_size=len(some)))
            new = shard_evenly(starts, starts + np.array(counts), ranks)
            holdings.note(some, new)
            for number, sequence in enumerate(some):
                one = new.select(new.document == number)
                one.document[:] = 0
                held[sequence] = held_after(held[sequence], one)
        for _ in range(data.draw(st.integers(0, 12))):
            decode = plan_decode(holdings, some, masks)
            for number, sequence in enumerate(some):
                check_one(decode, number, held, sequence, masks)
            holdings.note_decoded(holdings.lines(some))
        placed = holdings.placement(some)
        for number, sequence in enumerate(some):
            mine = placed.select(placed.document == number)
            for name in ("start", "end", "rank"):
                assert getattr(mine, name).tolist() == getattr(held[sequence], name).tolist()
            assert holdings.length(sequence) == int(mine.end.max(initial=0))


def check_one(
    decode: DecodeBatch, number: int, held: Any, sequence: int, masks: list[Mask]
) -> None:
    """Holds a sequence's part of a decode step against the plan of all its pieces."""
    before, position = held[sequence], int(decode.positions[number])
    assert decode.before[number].tolist() == before.tokens_per_rank().tolist()
    new = type(before)(
        *(np.array([each]) for each in (0, position, position + 1, decode.owners[number])),
        before.world_size,
    )
    for mask in masks:
        stepped = step_plan(before, new, "pass-q", mask, block=8)
        validate_stepped_plan(stepped)
        plan = stepped.plan
        visible = decode.rows - decode.hidden[mask]
        assert keys_of_servers(plan)[0].tolist() == visible[number].tolist()
        moved = plan.q_segments.moved_rows(plan.world_size).sum(axis=0)
        assert moved.tolist() == decode.away(mask)[number].astype(int).tolist()
        expected = stepped_bytes(stepped, SHAPE).total
        assert decode.bytes_by_sequence(mask, SHAPE)[number] == expected
    held[sequence] = held_after(before, new)


def decoding(stripe: int, prompt: int, decoded: int) -> tuple[Holdings, list[int]]:
    """16 sequences with long prompts and as many decoded tokens, on four ranks."""
    holdings, sequences = Holdings(4, stripe), list(range(16))
    starts = np.zeros(16, dtype=np.int64)
    holdings.note(sequences, shard_evenly(starts, starts + prompt, 4))
    lines = holdings.lines(sequences)
    holdings.note_decoded(lines, decoded)
    return holdings, sequences


def work_of_a_step(holdings: Holdings, sequences: list[int]) -> tuple[int, int]:
    """Calls of functions in a step's planning, and the most bytes that it allocates."""
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        plan_decode(holdings, sequences, [Mask(), Mask(4096)])
        holdings.note_decoded(holdings.lines(sequences))
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, peak


@pytest.mark.parametrize("stripe", [1, 16, 128])
def test_a_steps_work_does_not_grow_with_the_context(stripe: int) -> None:
    found = []
    for prompt, decoded in ((1000, 300), (66_000, 66_000)):
        holdings, sequences = decoding(stripe, prompt, decoded)
        work_of_a_step(holdings, sequences)
        found.append(work_of_a_step(holdings, sequences))
    assert found[0][0] == found[1][0]
    assert found[1][1] <= found[0][1] + 2000
    assert found[1][1] < 40_000
