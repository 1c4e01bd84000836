"""Decode steps by numbers of rows are the plans that are made of all pieces, however long."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.steps import stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, Plan, validate_stepped_plan
from distca.plan.span import Int64s
from distca.schedule.serving import held_after, nobody_holds, step_plan
from distca.schedule.serving.batches import DecodeBatch
from distca.schedule.serving.iteration import plan_iteration, rows_on_ranks
from distca.schedule.serving.scheduled import ScheduledTokens

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16)


def keys_of_servers(plan: Plan) -> Int64s:
    """Keys that each server has for each document's queries, `[documents, ranks]`."""
    keys = np.zeros((len(plan.lengths), plan.world_size), dtype=np.int64)
    tasks = plan.tasks
    np.add.at(keys, (tasks.document, tasks.server), tasks.kv_end - tasks.kv_start)
    return keys


def plan_decode(
    owners: dict[int, list[int]], lengths: dict[int, int], size: int, ranks: int, masks: list[Mask]
) -> DecodeBatch:
    """Plans a step that feeds the next token of sequences; `owners` are those of their blocks."""
    entries = [
        ScheduledTokens(each, lengths[each], 1, np.array(owners[each], dtype=np.int64))
        for each in owners
    ]
    decode = plan_iteration(entries, masks, size, ranks, "pass-kv").decode
    assert decode is not None
    return decode


def pieces(owners: list[int], length: int, size: int, ranks: int) -> Placement:
    """Who holds the tokens of a sequence, block by block."""
    held = nobody_holds(ranks)
    for block, start in enumerate(range(0, length, size)):
        one = (np.array([each]) for each in (0, start, min(start + size, length), owners[block]))
        held = held_after(held, Placement(*one, ranks))
    return held


@settings(max_examples=30)
@given(st.data())
def test_decode_steps_are_the_plans_of_all_pieces(data: st.DataObject) -> None:
    """Blocks of any size, on any ranks, of sequences of any lengths."""
    ranks, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    masks = [Mask(), Mask(data.draw(st.integers(0, 20)))]
    lengths = {each: data.draw(st.integers(1, 60)) for each in (3, 8, 5, 4)}
    rank = st.integers(0, ranks - 1)
    owners = {each: [data.draw(rank) for _ in range(13 // size + 61)] for each in lengths}
    for _ in range(data.draw(st.integers(1, 12))):
        decode = plan_decode(owners, lengths, size, ranks, masks)
        for number, sequence in enumerate(owners):
            held = pieces(owners[sequence], lengths[sequence], size, ranks)
            check_one(decode, number, held, masks)
            assert decode.owners[number] == owners[sequence][lengths[sequence] // size]
            lengths[sequence] += 1


def check_one(decode: DecodeBatch, number: int, before: Placement, masks: list[Mask]) -> None:
    """Holds a sequence's part of a decode step against the plan of all its pieces."""
    position = int(decode.positions[number])
    assert decode.before[number].tolist() == before.tokens_per_rank().tolist()
    new = Placement(
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


@settings(max_examples=50)
@given(st.data())
def test_rows_of_short_and_long_sequences_are_counted(data: st.DataObject) -> None:
    """Beside each other, up to any position, with blocks behind it that have no rows yet."""
    ranks, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    feeds, ends = [], []
    for number in range(data.draw(st.integers(1, 5))):
        blocks = data.draw(st.integers(1, 4) | st.integers(31, 34))
        owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=blocks, max_size=blocks))
        feeds.append(ScheduledTokens(number, blocks * size - 1, 1, np.array(owners)))
        ends.append(data.draw(st.integers(0, blocks * size)))
    expected = np.zeros((len(feeds), ranks), dtype=np.int64)
    for number, end in enumerate(ends):
        for position in range(end):
            expected[number, feeds[number].ranks[position // size]] += 1
    found = rows_on_ranks(feeds, np.array(ends), size, ranks)
    assert found.tolist() == expected.tolist()


def work_of_a_step(blocks: int, size: int) -> tuple[int, int]:
    """The least calls and least peak of bytes of three tries: other threads allocate as well."""
    tries = [work_of_one_try(blocks, size) for _ in range(3)]
    return min(calls for calls, _ in tries), min(peak for _, peak in tries)


def work_of_one_try(blocks: int, size: int) -> tuple[int, int]:
    """Calls of functions in a step's planning, and the most bytes that it allocates."""
    calls = 0
    owners = {each: [block % 4 for block in range(blocks)] for each in range(16)}
    entries = [
        ScheduledTokens(each, blocks * size - 1, 1, np.array(ranks, dtype=np.int64))
        for each, ranks in owners.items()
    ]

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        plan_iteration(entries, [Mask(), Mask(4096)], size, 4, "pass-kv")
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, peak


@pytest.mark.parametrize("size", [16, 256])
def test_a_steps_work_does_not_grow_with_the_context(size: int) -> None:
    work_of_a_step(8, size)
    found = [work_of_a_step(tokens // size, size) for tokens in (16_384, 131_072)]
    assert found[0][0] == found[1][0]
    assert found[1][1] <= found[0][1] + 2000
    assert found[1][1] < 40_000
