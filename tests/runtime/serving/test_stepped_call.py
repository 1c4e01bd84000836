"""Plans with steps give dense attention's outputs, and move the bytes that they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.volume import AttentionShape
from distca.plan import (
    Mask,
    Placement,
    Plan,
    SteppedPlan,
    Tasks,
    validate_plan,
    validate_stepped_plan,
)
from distca.runtime import CoreAttention
from distca.runtime.serving.step_exchange import build_stepped_exchange
from distca.runtime.serving.stepped_call import attend_in_steps
from distca.schedule.serving import (
    STRATEGIES,
    Strategy,
    held_after,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.schedule.serving.csps.head_scatter import head_groups
from distca.schedule.serving.steps import step_program
from distca.transport import CollectiveTransport
from distca.transport.shared_memory import SharedMemoryTransport
from support.random_plans import dense_attention, random_lengths, random_plan
from support.stepped import CPU, SCALE, RankOfPlan, check_rank, inputs, rows_of, run_virtually

SHAPES = [AttentionShape(4, 2, 8, 4), AttentionShape(3, 1, 6, 4)]


def any_holdings(data: st.DataObject, ranks: int, sequences: int) -> tuple[Placement, np.ndarray]:
    """Cached prefixes of sequences that lie anyhow on ranks, and their lengths."""
    held, at = nobody_holds(ranks), np.zeros(sequences, dtype=np.int64)
    for _ in range(data.draw(st.integers(0, 2))):
        ends = (
            at
            + np.array(data.draw(st.lists(st.integers(0, 60), min_size=3, max_size=3)))[:sequences]
        )
        numbers = np.flatnonzero(ends > at)
        if data.draw(st.booleans()):
            new = shard_in_stripes(
                at, ends, np.arange(sequences), data.draw(st.integers(1, 9)), ranks
            )
        else:
            rank = np.full(len(numbers), data.draw(st.integers(0, ranks - 1)))
            new = Placement(numbers, at[numbers], ends[numbers], rank, ranks)
        held, at = held_after(held, new), ends
    return held, at


@pytest.mark.parametrize("strategy", [*STRATEGIES, "all-gather", "sp-ntp"])
@settings(max_examples=40)
@given(st.data())
def test_any_prefill_is_dense_attention(strategy: Strategy, data: st.DataObject) -> None:
    """Sequences of odd lengths, cached anywhere or not, under windows, on up to five ranks."""
    ranks = data.draw(st.sampled_from([3, 1, 2, 4, 5]))
    sequences = data.draw(st.integers(1, 3))
    held, at = any_holdings(data, ranks, sequences)
    new = np.array(data.draw(st.lists(st.integers(1, 60), min_size=3, max_size=3)))[:sequences]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    shape = replace(data.draw(st.sampled_from(SHAPES)), dtype_bytes=dtype.itemsize)
    plan = step_plan(
        held,
        shard_evenly(at, at + new, ranks),
        strategy,
        Mask(data.draw(st.none() | st.integers(0, 40))),
        block=8,
        in_steps=True,
        head_groups=head_groups(shape.heads, shape.kv_heads, ranks),
    )
    validate_stepped_plan(plan)
    run_virtually(plan, shape, dtype)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([None, 0, 25]))
def test_any_tasks_in_any_steps_are_dense_attention(seed: int, window: int | None) -> None:
    """Queries and keys travel together, to servers that each compute in a step of their own."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 5))
    lengths = random_lengths(rng, ranks * 96)
    plan = random_plan(rng, lengths, ranks, 96, Mask(window))
    step_of = rng.permutation(ranks) // int(rng.integers(1, 3))
    _, step = np.unique(step_of[plan.tasks.server], return_inverse=True)
    stepped = SteppedPlan(plan, step)
    validate_stepped_plan(stepped)
    run_virtually(stepped, SHAPES[seed % 2], torch.float32)


@pytest.mark.parametrize("step", [[0, 1, 1, 2], [1, 0, 2, 3], [0, 0, 0, 1]])
def test_outputs_that_returned_before_a_rank_computes_are_kept(step: list[int]) -> None:
    """Rank 1's own keys meet its queries last; those of rank 0 do in the first step or later."""
    placement = Placement(*(np.array(x) for x in ([0, 0, 1], [0, 8, 0], [8, 16, 8], [0, 1, 0])), 2)
    rows = [(0, 8, 16, 0, 8, 0), (0, 0, 8, 0, 8, 0), (1, 0, 8, 0, 8, 0), (0, 8, 16, 8, 16, 1)]
    whole = Plan(np.array([16, 8]), placement, Tasks.from_rows(rows), block=8)
    plan = SteppedPlan(whole, np.array(step))
    validate_stepped_plan(plan)
    run_virtually(plan, SHAPES[0], torch.float32)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_partial_outputs_of_half_precision_add_up_in_float32(strategy: Strategy) -> None:
    """Their own rounding averages out over ten ranks; that of a sum at each step would not."""
    ranks, shape = 10, replace(SHAPES[0], dtype_bytes=2)
    zero, end = np.array([0]), np.array([ranks * 40])
    held = held_after(nobody_holds(ranks), shard_evenly(zero, end, ranks))
    new = shard_evenly(end, end + ranks * 20, ranks)
    plan = step_plan(held, new, strategy, Mask(), in_steps=True)
    whole = plan.plan
    q, k, v = (each.bfloat16().double() for each in inputs(whole, shape))
    exact = dense_attention(q, k, v, whole.lengths, whole.mask, SCALE)
    far = []
    for rank, (out, lse) in enumerate(run_virtually(plan, shape, torch.bfloat16)):
        assert out.dtype == lse.dtype == torch.float32
        far.append(out - exact[rows_of(whole, rank)[0]])
    rounded_once = exact.bfloat16() - exact
    assert torch.cat(far).square().mean() < 0.6 * rounded_once.square().mean()


def test_a_diagonal_that_begins_after_its_first_query() -> None:
    """Full rectangles of the same queries cannot lie before it in a kernel sequence."""
    placement = Placement(*(np.array(x) for x in ([0, 0], [0, 8], [8, 24], [0, 0])), 1)
    rows = [(0, 8, 24, 0, 8, 0), (0, 8, 24, 16, 24, 0), (0, 8, 16, 8, 16, 0), (0, 16, 24, 8, 16, 0)]
    prefix = np.array([8])
    plan = Plan(np.array([24]), placement, Tasks.from_rows(rows), block=8, cached_prefix=prefix)
    validate_plan(plan)
    run_virtually(SteppedPlan.at_once(plan), SHAPES[0], torch.float32)


def turn(ranks: int, strategy: Strategy) -> SteppedPlan:
    """A turn of two sequences, after one of 200 tokens on one rank and an answer in stripes."""
    held = Placement(*(np.array([each]) for each in (0, 0, 200, 1)), ranks)
    at, end = np.array([200, 0]), np.array([230, 11])
    held = held_after(held, shard_in_stripes(at, end, np.arange(2), 4, ranks))
    new = shard_evenly(end, end + np.array([150, 33]), ranks)
    return step_plan(held, new, strategy, Mask(), block=16, in_steps=True)


def on_rank(plan: SteppedPlan, shape: AttentionShape, dtype: torch.dtype, over: str) -> None:
    group = dist.group.WORLD
    transport = SharedMemoryTransport(group) if over == "shm" else CollectiveTransport(group, CPU)
    rank = RankOfPlan(plan, transport, shape, dtype)
    for _ in range(3):
        transport.bytes_sent.clear()
        transport.bytes_received.clear()
        call = rank.call()
        for event in step_program(plan.steps):
            call.do(event)
        check_rank(plan, transport, call.outputs()[0].to(dtype), shape)
    transport.close()


@pytest.mark.parametrize("over", ["collective", "shm"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transports(ranks, strategy: Strategy, over: str) -> None:
    """Layer after layer, in the same two buffers."""
    dtype = torch.bfloat16 if over == "shm" else torch.float32
    shape = replace(SHAPES[0], dtype_bytes=dtype.itemsize)
    ranks.run(on_rank, turn(3, strategy), shape, dtype, over, world_size=3)


def test_a_fresh_prompt_is_one_rectangle_a_step() -> None:
    """Of a rank's two pieces of queries and two of keys, and none of its keys is copied."""
    new = shard_evenly(np.array([0]), np.array([160]), 4)
    for strategy in STRATEGIES:
        plan = step_plan(nobody_holds(4), new, strategy, Mask(), in_steps=True)
        for rank in range(4):
            steps = build_stepped_exchange(plan, rank).steps
            assert [len(step.calls) for step in steps[1:]] == [1, 1, 1]
            for call in (call for step in steps for call in step.calls):
                assert isinstance(call.queries, slice)
                assert [type(part.rows) for part in call.keys] == [slice]


def test_rows_of_a_step_travel_while_the_one_before_is_computed() -> None:
    events = step_program(3)
    assert [event for event in events if event.action == "compute"] == [
        ("compute", 0),
        ("compute", 1),
        ("compute", 2),
    ]
    for step in (1, 2):
        assert events.index(("dispatch", step)) < events.index(("compute", step - 1))
        # What was received is passed on.
        assert events.index(("receive", step - 1)) < events.index(("dispatch", step))
        assert events.index(("compute", step)) < events.index(("combine", step - 1))
    assert step_program(1) == (("dispatch", 0), ("receive", 0), ("compute", 0), ("combine", 0))


def test_other_queries_than_the_plans_are_refused() -> None:
    plan = turn(2, "pass-kv")
    core = CoreAttention(None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q has 3 rows, but the plan places 92 queries on rank 0"):
        attend_in_steps(core, *[torch.zeros(3, 1, 8)] * 3, build_stepped_exchange(plan, 0), 1.0)
