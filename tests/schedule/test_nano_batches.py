"""Ping and pong: equal tokens, documents whole where they can be, every pair in one of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.plan import Mask, Plan, load_plan, save_plan
from distca.schedule import (
    BALANCING,
    SCHEDULERS,
    Crossing,
    NanoPlan,
    ScheduleConfig,
    make_scheduler,
    move_tiles,
    pool,
    split_in_two,
)
from distca.schedule.training.nano_batches import Half
from support.batches import documents


def even(lengths: np.ndarray) -> np.ndarray:
    """The same documents, the last a token shorter (or gone) if there are oddly many tokens."""
    if lengths.sum() % 2:
        lengths = lengths.copy()
        lengths[-1] -= 1
    return lengths[lengths > 0]


@given(documents())
def test_halves(drawn) -> None:
    lengths = even(drawn[0])
    loads = lengths.astype(np.float64) ** 2
    halves = split_in_two(lengths, loads)
    tokens = [int((half.end - half.start).sum()) for half in halves]
    assert tokens[0] == tokens[1] == lengths.sum() // 2
    covered = np.zeros(len(lengths), dtype=np.int64)
    for half in halves:
        assert (half.end > half.start).all()
        np.add.at(covered, half.document, half.end - half.start)
    assert (covered == lengths).all()
    ping, pong = halves
    both = np.intersect1d(ping.document, pong.document)
    assert len(both) <= 1
    if len(both):
        assert ping.document[-1] == pong.document[0] == both[0]
        assert ping.start[-1] == 0
        assert ping.end[-1] == pong.start[0]
        assert pong.end[0] == lengths[both[0]]
    assert (ping.start == 0).all()


def test_documents_stay_whole_where_they_can() -> None:
    lengths = np.array([700, 300, 500, 200, 180, 20, 64, 36])
    ping, pong = split_in_two(lengths, lengths.astype(np.float64) ** 2)
    assert not len(np.intersect1d(ping.document, pong.document))
    with pytest.raises(ValueError, match="3 tokens cannot be halved"):
        split_in_two(np.array([3]), np.array([1.0]))


def planned(
    lengths: np.ndarray, ranks: int, mask: Mask, name: str, config: ScheduleConfig
) -> tuple[tuple[Half, Half], list[NanoPlan]]:
    """The plans of both halves on some ranks, as a micro-batch's are made."""
    scheduler = make_scheduler(name, config)
    halves = split_in_two(lengths, lengths.astype(np.float64) ** 2)
    plans: list[Plan] = []
    for half in halves:
        own = half.end - half.start
        capacities = np.full(ranks, own.sum() // ranks) + (np.arange(ranks) < own.sum() % ranks)
        plans.append(scheduler.plan(own, capacities, mask))
    crossing = None
    if len(halves[1].start) and halves[1].start[0]:
        placement = plans[0].placement
        earlier = placement.select(placement.document == len(plans[0].lengths) - 1)
        crossing = Crossing(0, earlier)
    return halves, [NanoPlan(plans[0]), NanoPlan(plans[1], crossing)]


@settings(deadline=None)
@given(
    documents(most_ranks=6),
    st.sampled_from(list(SCHEDULERS)),
    st.sampled_from([None, 0, 60, 400]),
    st.integers(1, 3),
    st.booleans(),
)
def test_plans_of_both_cover_every_pair_once(drawn, name, window, stages, pooled) -> None:
    """`validate` sees to each half by itself; together they have all pairs of all documents."""
    lengths, mask = even(drawn[0]), Mask(window)
    ranks = min(len(drawn[1]), max(1, int(lengths.sum()) // 4))
    if not len(lengths):
        return
    config = ScheduleConfig()
    halves, nano = planned(lengths, ranks, mask, name, config)
    servers = np.arange(stages * ranks).reshape(stages, ranks)
    scheduler = make_scheduler(name, config) if pooled and stages > 1 else None

    def move(plan: Plan) -> Plan:
        return move_tiles(plan, config)

    pairs = 0
    for number, half in enumerate(halves):
        # The same micro-batch in the first and the last stage, and none between.
        of_stages = [nano[number] if n in (0, stages - 1) else None for n in range(stages)]
        plan = pool(of_stages, servers, scheduler, move if name in BALANCING else None)
        plan.validate()
        assert plan.own_tokens_per_rank().sum() == (half.end - half.start).sum() * min(stages, 2)
        pairs += int(plan.loads().sum())
        assert (plan.loads_at_home().sum()) == plan.loads().sum()
    everything = mask.pairs(np.zeros_like(lengths), lengths, np.zeros_like(lengths), lengths)
    assert pairs == int(everything.sum()) * min(stages, 2)


def test_a_crossing_document_is_balanced() -> None:
    """One document: pong has three quarters of the pairs, evenly on all servers."""
    config = ScheduleConfig()
    lengths = np.array([16_384])
    _, nano = planned(lengths, 4, Mask(), "tiles", config)
    servers = np.arange(4).reshape(1, 4)
    plan = pool([nano[1]], servers, None, lambda p: move_tiles(p, config))
    plan.validate()
    assert plan.cached_prefix is not None
    assert plan.cached_prefix[0] == 8192
    loads = plan.loads()
    assert loads.max() <= 1.1 * loads.mean()
    assert loads.sum() == Mask().pairs(8192, 16_384, 0, 16_384)


def test_such_plans_are_saved_and_checked(tmp_path) -> None:
    _, nano = planned(np.array([2048]), 2, Mask(), "tiles", ScheduleConfig())
    plan = pool([nano[1]], np.arange(2).reshape(1, 2))
    save_plan(plan, tmp_path / "plan.json")
    loaded, _ = load_plan(tmp_path / "plan.json")
    assert (loaded.cached_prefix == plan.cached_prefix).all()
    for change, message in (
        (np.array([900]), "a piece is only in part cached"),
        (np.array([2048]), "a document has no query"),
        (None, "not all covered"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(plan.lengths, plan.placement, plan.tasks, cached_prefix=change).validate()
