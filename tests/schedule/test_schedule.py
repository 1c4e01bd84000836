"""The schedulers over random batches: valid, within the tolerance or explained, repeatable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.kernel_time import AnalyticCost, CostModel
from distca.cost.link import Links
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement, Plan, place_in_turn, validate_plan
from distca.plan.plan import max_over_mean
from distca.plan.span import Int64s
from distca.schedule import (
    ScheduleConfig,
    describe,
    format_summary,
    make_scheduler,
    plain_loads,
)
from distca.schedule.base import server_loads, tasks_at_home
from support.batches import SlowStart, documents, long_tailed_lengths, task_rows

SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=64)


@dataclass(frozen=True)
class Batch:
    lengths: Int64s
    placement: Placement


def in_turn(lengths: Int64s, capacities: Int64s) -> Batch:
    return Batch(lengths, place_in_turn(lengths, capacities))


batches = documents().map(lambda drawn: in_turn(*drawn))


def long_tailed(seed: int, world_size: int, tokens: int, longest: int) -> Batch:
    lengths = long_tailed_lengths(seed, world_size * tokens, tokens // 16, longest)
    return in_turn(lengths, np.full(world_size, tokens))


def of_lengths(lengths: list[int], world_size: int, tokens: int) -> Batch:
    return in_turn(np.array(lengths, dtype=np.int64), np.full(world_size, tokens))


def make(name: str, batch: Batch, mask: Mask | None = None, **config: object) -> Plan:
    made = ScheduleConfig(shape=SHAPE, **config)  # type: ignore[arg-type]
    return make_scheduler(name, made).schedule(batch.lengths, batch.placement, mask or Mask())


@settings(max_examples=100)
@given(
    batches,
    st.sampled_from([Mask(), Mask(0), Mask(100), Mask(999)]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.sampled_from([32, 128]),
    st.sampled_from([None, SlowStart()]),
)
def test_greedy_plans_of_random_batches(
    batch: Batch, mask: Mask, tolerance: float, block: int, cost_model: CostModel | None
) -> None:
    config = {"tolerance": tolerance, "block": block, "cost_model": cost_model}
    plan = make("greedy", batch, mask, **config)
    validate_plan(plan)
    assert (plan.scheduler, plan.block, plan.mask) == ("greedy", block, mask)
    again = make("greedy", batch, mask, **config)
    assert task_rows(again) == task_rows(plan)
    assert again.notes == plan.notes
    # Every query has its whole context.
    t = plan.tasks
    assert np.array_equal(t.q_end, t.kv_end)
    assert np.array_equal(t.kv_start, mask.first_key(t.q_start))
    loads = server_loads(t, mask, plan.world_size, cost_model)
    off = np.abs(loads - loads.mean()).max() / loads.mean()
    assert off <= tolerance + 1e-6 or plan.notes
    assert off >= tolerance - 1e-6 or not plan.notes
    # Neighbours on one server are one task.
    ends = {(d, q_end, s) for d, _, q_end, _, _, s in task_rows(plan)}
    assert not ends & {(d, q_start, s) for d, q_start, _, _, _, s in task_rows(plan)}
    if cost_model is None:
        limit = max(plan.loads_at_home().max(), (1 + tolerance) * loads.mean())
        assert loads.max() <= limit + 1e-6 * loads.mean()


@settings(max_examples=60)
@given(batches, st.sampled_from([Mask(), Mask(100)]))
def test_packed_moves_no_query(batch: Batch, mask: Mask) -> None:
    plan = make("packed", batch, mask)
    at = batch.placement
    assert task_rows(plan) == [
        (int(d), int(start), int(end), int(mask.first_key(start)), int(end), int(rank))
        for d, start, end, rank in zip(at.document, at.start, at.end, at.rank, strict=True)
    ]
    assert np.array_equal(plan.loads(), plan.loads_at_home())
    assert plan_bytes(plan, SHAPE).phases["combine"].sum() == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cost_model", [None, AnalyticCost.of_shape(SHAPE), SlowStart(10**5)])
def test_greedy_balances_long_tailed_batches(seed: int, cost_model: CostModel | None) -> None:
    batch = long_tailed(seed, world_size=8, tokens=16384, longest=65536)
    plan = make("greedy", batch, tolerance=0.1, cost_model=cost_model)
    validate_plan(plan)
    loads = server_loads(plan.tasks, plan.mask, 8, cost_model)
    assert max_over_mean(plan.loads_at_home()) > 1.5
    assert loads.max() <= 1.1 * loads.mean()
    assert loads.min() >= 0.9 * loads.mean()
    assert plan.notes == ()


def test_greedy_follows_a_tighter_tolerance_at_the_price_of_bytes() -> None:
    batch = long_tailed(0, world_size=8, tokens=16384, longest=65536)
    loose, tight = (make("greedy", batch, tolerance=t) for t in (0.5, 0.02))
    assert max_over_mean(tight.loads()) <= 1.02
    assert 1.02 < max_over_mean(loose.loads()) <= 1.5
    assert plan_bytes(loose, SHAPE).total < plan_bytes(tight, SHAPE).total


@pytest.mark.parametrize("window", [None, 500])
def test_one_document_on_all_ranks(window: int | None) -> None:
    batch, mask = of_lengths([4 * 4096], world_size=4, tokens=4096), Mask(window)
    plan = make("greedy", batch, mask)
    validate_plan(plan)
    before = max_over_mean(plan.loads_at_home())
    if window is None:
        assert before == pytest.approx(7 / 4, abs=1e-3)
        assert max_over_mean(plan.loads()) <= 1.1
    else:  # in a window all ranks have nearly the same to do
        assert before < 1.1
        assert task_rows(plan) == task_rows(make("packed", batch, mask))


def test_equal_documents_stay_at_home() -> None:
    plan = make("greedy", of_lengths([1000] * 12, world_size=4, tokens=3000), tolerance=0.0)
    assert task_rows(plan) == task_rows(make("packed", of_lengths([1000] * 12, 4, 3000)))
    assert plan_bytes(plan, SHAPE).total == 0
    assert plan.notes == ()


def test_one_rank_has_nothing_to_balance() -> None:
    plan = make("greedy", of_lengths([1, 300, 83], world_size=1, tokens=384), tolerance=0.0)
    validate_plan(plan)
    assert plan.tasks.server.tolist() == [0, 0, 0]
    assert plan.notes == ()


def test_the_inner_part_of_a_long_document_moves() -> None:
    # Rank 0 owns one long document, rank 1 many short ones.
    batch = of_lengths([4096] + [128] * 32, world_size=2, tokens=4096)
    plan = make("greedy", batch, tolerance=0.05)
    validate_plan(plan)
    assert max_over_mean(plan.loads()) <= 1.05
    moved = plan.tasks[(plan.tasks.server == 1) & (plan.tasks.document == 0)]
    assert len(moved) == 1
    start, end = int(moved.q_start[0]), int(moved.q_end[0])
    assert abs((start + end) / 2 - 2048) <= 128
    assert plan.tasks.server[plan.tasks.document > 0].tolist() == [1] * 32
    # Its last rows would have the same load and more keys.
    row = 2 * SHAPE.q_row_bytes + SHAPE.lse_row_bytes
    forward = plan_bytes(plan, SHAPE).forward()
    assert forward.total == (end - start) * row + end * SHAPE.kv_row_bytes


def test_short_documents_stay_where_a_long_one_can_move() -> None:
    short = [128] * 8
    batch = of_lengths([3072, *short, *[128] * 32], world_size=2, tokens=4096)
    plan = make("greedy", batch)
    home = np.repeat([0, 1], [9, 32])
    stayed = plan.tasks.document > 0
    assert np.array_equal(plan.tasks.server[stayed], home[plan.tasks.document[stayed]])
    assert max_over_mean(plan.loads()) <= 1.1


@pytest.mark.parametrize(("heads", "moved"), [(1, 1), (64, 0)])
def test_the_part_with_the_most_load_for_its_bytes_moves(heads: int, moved: int) -> None:
    # Rank 0 has a little more to do than rank 1. The short document's part needs few keys, the
    # long one's few queries: which is cheaper is for the widths of their rows to say.
    batch = of_lengths([4096, 1024, 4096, *[128] * 8], world_size=2, tokens=5120)
    config = ScheduleConfig(tolerance=0.02, shape=AttentionShape(heads, 1, 64))
    plan = make_scheduler("greedy", config).schedule(batch.lengths, batch.placement, Mask())
    validate_plan(plan)
    assert max_over_mean(plan.loads_at_home()) > 1.02 >= max_over_mean(plan.loads())
    away = (plan.tasks.server == 1) & (plan.tasks.document < 2)
    assert plan.tasks.document[away].tolist() == [moved]


def test_a_rank_without_tokens_serves() -> None:
    column = np.array([0, 0], dtype=np.int64)
    at = Placement(column, np.array([0, 1024]), np.array([1024, 2048]), np.array([0, 2]), 4)
    plan = make("greedy", Batch(np.array([2048]), at))
    validate_plan(plan)
    assert plan.loads_at_home()[[1, 3]].tolist() == [0, 0]
    assert (plan.loads() > 0).all()
    assert max_over_mean(plan.loads()) < 1.25 < max_over_mean(plan.loads_at_home())


@pytest.mark.parametrize(
    "batch",
    [
        of_lengths([512], world_size=4, tokens=128),  # each rank has one block
        of_lengths([100, *[1] * 300], world_size=4, tokens=100),
    ],
)
def test_blocks_too_coarse_for_the_tolerance_are_noted(batch: Batch) -> None:
    plan = make("greedy", batch)
    validate_plan(plan)
    assert max_over_mean(plan.loads()) > 1.1
    assert len(plan.notes) == 1
    assert "outside the tolerance of 0.1" in plan.notes[0]
    assert "blocks of 128 tokens" in plan.notes[0]


def test_a_tolerance_that_blocks_can_meet_needs_no_note() -> None:
    assert make("greedy", of_lengths([512], world_size=4, tokens=128), tolerance=0.99).notes == ()


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_out_of_range_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match=r"from 0 to below 1, such as 0\.1"):
        ScheduleConfig(tolerance=tolerance)


def test_a_block_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="block 0"):
        ScheduleConfig(block=0)


def test_an_unknown_scheduler_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no scheduler 'tilse': choose from packed, "):
        make_scheduler("tilse", ScheduleConfig())


def test_the_summary_of_a_plan() -> None:
    batch = long_tailed(1, world_size=8, tokens=4096, longest=16384)
    plan = make("greedy", batch)
    moved = plan_bytes(plan, SHAPE, "keep")
    summary = describe(plan, ScheduleConfig(shape=SHAPE, links=Links(4)), "keep")
    plain = plain_loads(batch.lengths, np.full(8, 4096), Mask())
    assert summary.load_max_over_mean_before == plain.max() / plain.mean()
    assert summary.load_max_over_mean == max_over_mean(plan.loads())
    assert summary.load_min_over_mean == plan.loads().min() / plan.loads().mean()
    assert summary.bytes_total == moved.forward().total
    assert summary.bytes_max_sent == moved.forward().sent().max()
    assert summary.bytes_max_received == moved.forward().received().max()
    assert summary.bytes_total + summary.bytes_backward == moved.total
    assert (summary.servers, summary.documents) == (8, len(batch.lengths))
    assert (summary.tokens, summary.tasks) == (8 * 4096, len(plan.tasks))
    at, t = batch.placement, plan.tasks
    assert summary.kernel_calls == 8
    assert summary.tokens_max_over_mean == 1.0
    dispatched = moved.phases["dispatch"]
    assert summary.bytes_max_buffered == dispatched.sum(axis=0).max()
    halves = np.arange(8) // 4
    across = halves[:, None] != halves[None, :]
    forward = moved.forward().phases.values()
    assert summary.bytes_between_nodes == sum(int(matrix[across].sum()) for matrix in forward) > 0
    for found, document, place in (
        (summary.documents_spanning, at.document, at.rank),
        (summary.documents_split, t.document, t.server),
    ):
        places = [set(place[document == d].tolist()) for d in range(len(batch.lengths))]
        assert found == sum(len(p) > 1 for p in places) > 0
    owner = np.arange(8 * 4096) // 4096
    away = sum(
        int((owner[offset + q_start : offset + q_end] != server).sum())
        for offset, q_start, q_end, server in zip(
            plan.document_offsets[t.document], t.q_start, t.q_end, t.server, strict=True
        )
    )
    assert summary.query_rows_moved == away > 0
    text = format_summary(summary)
    assert text.splitlines()[0] == "plan by greedy for 8 servers"
    assert f"{summary.load_max_over_mean_before:.3f} -> {summary.load_max_over_mean:.3f}" in text
    assert f"{summary.bytes_total / 1e6:,.2f} forward" in text
    assert f"; {summary.bytes_between_nodes / 1e6:,.2f} forward between nodes\n" in text
    busy = f"  links           busy for at most {1e3 * summary.link_seconds_max:.3f} ms forward"
    assert busy in text.splitlines()
    without = format_summary(summary, known_links=False)
    assert text.splitlines() == [*without.splitlines()[:6], busy, *without.splitlines()[6:]]


def test_the_summary_says_what_moves_where_no_query_does() -> None:
    batch = of_lengths([3072, 512, 512], world_size=4, tokens=1024)
    summary = describe(
        make("per-document-cp", batch, context_parallel_size=4), ScheduleConfig(shape=SHAPE)
    )
    assert (summary.query_rows_moved, summary.bytes_total > 0) == (0, True)
    assert summary.key_rows_moved * SHAPE.kv_row_bytes == summary.bytes_total
    (line,) = [each for each in format_summary(summary).splitlines() if "queries moved" in each]
    rows = f"{summary.key_rows_moved:,} rows of keys and values go to servers"
    assert line.endswith(f"0 rows, 0.0%; {rows}")
    # Where queries move, the line is of these alone; where nothing does, of nothing.
    text = format_summary(
        describe(make("packed", of_lengths([1024] * 4, 4, 1024)), ScheduleConfig(shape=SHAPE))
    )
    assert "queries moved   0 rows, 0.0%\n" in text


def test_the_summary_in_pairs_unless_times_were_measured_and_with_notes() -> None:
    """A rate that nobody measured gives no seconds."""
    plan = make("greedy", of_lengths([512], world_size=4, tokens=128))
    model = AnalyticCost(flops_per_pair=2.0, flops_per_second=1e3)
    assumed, plain = (
        describe(plan, ScheduleConfig(shape=SHAPE, cost_model=each)) for each in (model, None)
    )
    assert assumed == plain
    assert (plain.load_mean, plain.load_unit) == (plan.loads().mean(), "pairs")
    assert plan.notes[0] in format_summary(plain)


@pytest.mark.parametrize("tolerance", [-0.01, 1.0, 1.5])
def test_a_tolerance_is_a_fraction_of_the_mean_load(tolerance: float) -> None:
    with pytest.raises(ValueError, match="out of range: give a fraction of the mean load"):
        ScheduleConfig(tolerance=tolerance)


def test_pieces_that_follow_each_other_have_one_task_at_home() -> None:
    """Rank 0's two pieces of a document share its keys, which a kernel call then has once."""
    starts = np.array([0, 128, 256])
    placement = Placement(np.zeros(3, dtype=int), starts, starts + 128, np.array([0, 0, 1]), 2)
    plan = Plan(np.array([384]), placement, tasks_at_home(placement, Mask()))
    assert task_rows(plan) == [(0, 0, 256, 0, 256, 0), (0, 256, 384, 0, 384, 1)]
