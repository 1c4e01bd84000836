"""Context parallelism and WLB-LLM as schedulers: valid, balanced as they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement, Plan, place_in_turn, validate_plan
from distca.plan.plan import max_over_mean
from distca.plan.span import Int64s
from distca.schedule import COMPARED, SCHEDULERS, ScheduleConfig, even_capacities, make_scheduler
from distca.schedule.baselines.context_parallel import shard_documents
from distca.schedule.baselines.wlb_llm import MEMORY_FACTOR, delay_outliers
from support.batches import documents, long_tailed_lengths, placement_rows, task_rows

SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=64)
BASELINES = ("packed", "per-document-cp", "ring-zigzag", "wlb-llm")


def make(
    name: str, lengths: Int64s, capacities: Int64s, mask: Mask | None = None, **config
) -> Plan:
    scheduler = make_scheduler(name, ScheduleConfig(shape=SHAPE, **config))
    return scheduler.plan(lengths, capacities, mask or Mask())


def test_all_baselines_are_schedulers() -> None:
    assert list(SCHEDULERS) == [*BASELINES, "greedy", "tiles"]
    assert {*COMPARED} - {*SCHEDULERS} == {"hybrid-cp", "dynamic-cp"}


@settings(max_examples=120)
@given(
    documents(most_ranks=24),
    st.sampled_from(BASELINES),
    st.sampled_from([Mask(), Mask(0), Mask(100)]),
    st.sampled_from([None, 1, 2, 3]),
)
def test_plans_of_random_batches(
    batch: tuple[Int64s, Int64s], name: str, mask: Mask, size: int | None
) -> None:
    lengths, capacities = batch
    if size is not None and len(capacities) % size:
        if name != "packed":
            with pytest.raises(ValueError, match=f"size {size} does not divide"):
                make(name, lengths, capacities, mask, context_parallel_size=size)
        return
    plan = make(name, lengths, capacities, mask, context_parallel_size=size)
    validate_plan(plan)
    assert plan.scheduler == name
    if name != "wlb-llm":
        assert np.array_equal(plan.placement.tokens_per_rank(), capacities)
    # No query moves.
    assert plan_bytes(plan, SHAPE).phases["combine"].sum() == 0
    assert np.array_equal(plan.loads(), plan.loads_at_home())
    again = make(name, lengths, capacities, mask, context_parallel_size=size)
    assert (task_rows(again), placement_rows(again)) == (task_rows(plan), placement_rows(plan))


@pytest.mark.parametrize("ranks", [1, 4, 6])
def test_per_document_sharding_balances_every_group(ranks: int) -> None:
    lengths = np.array([1, 5003, 777, 12000, 2, 6501, 100])
    capacities = even_capacities(int(lengths.sum()), ranks)
    plan = make("per-document-cp", lengths, capacities, context_parallel_size=ranks)
    assert max_over_mean(plan.loads()) < 1.01
    # Chunk i and the ith last: a rank's two chunks mirror each other.
    for document, length in enumerate(lengths.tolist()):
        if length > 1000:
            at = plan.placement.select(plan.placement.document == document)
            for rank in range(ranks):
                mine = at.select(at.rank == rank)
                assert (
                    abs(int((mine.start + mine.end).sum()) - length * len(mine.rank)) <= 4 * ranks
                )


def test_shards_carry_rounding_errors_from_piece_to_piece_of_a_group() -> None:
    """Documents of one token: dealt out in turn, and anew in each group."""
    column = np.arange(5)
    groups = Placement(column, 0 * column, 0 * column + 1, np.array([0, 0, 0, 1, 1]), 2)
    at = shard_documents(groups, 2)
    assert at.tokens_per_rank().tolist() == [2, 1, 1, 1]
    assert at.rank[np.argsort(at.document)].tolist() == [0, 1, 0, 2, 3]


def test_a_group_is_as_small_as_the_longest_document_allows() -> None:
    lengths = np.array([2048, *[512] * 28])
    capacities = even_capacities(int(lengths.sum()), 8)
    plan = make("per-document-cp", lengths, capacities)
    assert capacities[0] == 2048
    assert np.unique(plan.placement.rank[plan.placement.document == 0]).tolist() == [0]
    lengths[0], lengths[1] = 2049, 511
    plan = make("per-document-cp", lengths, capacities)
    assert np.unique(plan.placement.rank[plan.placement.document == 0]).tolist() == [0, 1]


def test_the_ring_attends_part_by_part() -> None:
    plan = make("ring-zigzag", np.array([4096]), even_capacities(4096, 4), context_parallel_size=4)
    # Eight chunks of 512; the two in the middle are of one rank and touch: they are one.
    assert placement_rows(plan) == [
        (0, 0, 512, 0),
        (0, 3584, 4096, 0),
        (0, 512, 1024, 1),
        (0, 3072, 3584, 1),
        (0, 1024, 1536, 2),
        (0, 2560, 3072, 2),
        (0, 1536, 2560, 3),
    ]
    assert len(plan.tasks) == 7 * 8 // 2
    assert max_over_mean(plan.loads()) < 1.001


def test_ring_and_home_differ_in_tasks_alone() -> None:
    lengths = long_tailed_lengths(1, 8 * 2048, 400, 8192)
    ring = make("ring-zigzag", lengths, even_capacities(8 * 2048, 8), context_parallel_size=8)
    home = make_scheduler("packed", ScheduleConfig(shape=SHAPE)).schedule(
        lengths, ring.placement, Mask()
    )
    assert len(ring.tasks) > len(home.tasks)
    assert np.array_equal(ring.loads(), home.loads())
    for phase, matrix in plan_bytes(home, SHAPE).phases.items():
        assert np.array_equal(plan_bytes(ring, SHAPE).phases[phase], matrix)


def test_wlb_llm_balances_within_its_memory() -> None:
    lengths = long_tailed_lengths(2, 8 * 16384, 500, 4096)
    capacities = even_capacities(8 * 16384, 8)
    plan = make("wlb-llm", lengths, capacities)
    packed = make("packed", lengths, capacities)
    assert max_over_mean(plan.loads()) < 1.001 < 1.1 < max_over_mean(packed.loads())
    tokens = plan.placement.tokens_per_rank()
    assert 1.0 < tokens.max() / tokens.mean() <= MEMORY_FACTOR + 0.01
    # Documents fit a rank: they stay whole and nothing moves.
    assert plan_bytes(plan, SHAPE).total == 0


def test_wlb_llm_chooses_the_sharding_of_each_group() -> None:
    # With pairs as loads, sharding each document is never worse.
    lengths = np.array([3000, 3000, 1000, 1000])
    plan = make("wlb-llm", lengths, even_capacities(8000, 4), context_parallel_size=2)
    per_document = make(
        "per-document-cp", lengths, even_capacities(8000, 4), context_parallel_size=2
    )
    assert max_over_mean(plan.loads()) <= max_over_mean(per_document.loads())

    class OnlyLongTasks:
        description = "counts tasks"

        def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> np.ndarray:
            return np.ones(len(pairs))

    plan = make(
        "wlb-llm",
        lengths,
        even_capacities(8000, 4),
        context_parallel_size=2,
        cost_model=OnlyLongTasks(),
    )
    validate_plan(plan)
    assert len(plan.tasks) < 2 * 2 * len(lengths)


def test_outliers_wait_until_there_is_one_for_each_group() -> None:
    batches = [np.array(b) for b in ([9, 1, 1], [1, 8, 1, 7], [1, 1], [9, 2])]
    delayed = delay_outliers(batches, groups=2, threshold=5)
    assert [b.tolist() for b in delayed] == [[1, 1], [9, 8, 1, 1], [1, 1], [7, 9, 2]]
    before, after = (sorted(np.concatenate(b).tolist()) for b in (batches, delayed))
    assert before == after


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_given_placement_is_kept(name: str) -> None:
    lengths = long_tailed_lengths(4, 4 * 4096, 400, 6000)
    at = place_in_turn(lengths, even_capacities(4 * 4096, 4))
    scheduler = make_scheduler(name, ScheduleConfig(shape=SHAPE))
    plan = scheduler.schedule(lengths, at, Mask())
    validate_plan(plan)
    assert plan.placement is at
