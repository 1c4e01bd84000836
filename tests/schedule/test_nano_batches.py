"""Ping and pong: equal tokens, documents whole where they can be, every pair in one of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.plan import Mask, Plan, load_plan, save_plan, validate_plan
from distca.schedule import (
    BALANCING,
    SCHEDULERS,
    NanoPlan,
    ScheduleConfig,
    join_stages,
    make_scheduler,
    move_tiles,
    split_in_two,
)
from distca.schedule.training.micro_batches import DocumentParts, cut_chain
from distca.schedule.training.nano_batches import plan_chain
from support.batches import documents


def divisible(lengths: np.ndarray, parts: int = 2) -> np.ndarray:
    """The same documents, the last ones shorter (or gone) so that the tokens divide."""
    ends = np.minimum(np.cumsum(lengths), lengths.sum() // parts * parts)
    lengths = np.diff(ends, prepend=0)
    return lengths[lengths > 0]


@given(documents())
def test_halves(drawn) -> None:
    lengths = divisible(drawn[0])
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
    lengths: np.ndarray,
    ranks: int,
    mask: Mask,
    name: str,
    config: ScheduleConfig,
    micro_batches: int = 1,
    ping_pong: bool = True,
) -> list[tuple[tuple[DocumentParts, ...], tuple[NanoPlan, ...]]]:
    """Parts and plans of a chain's micro-batches on some ranks."""
    scheduler = make_scheduler(name, config)

    def loads(start: np.ndarray, end: np.ndarray) -> np.ndarray:
        return end.astype(np.float64) ** 2 - start.astype(np.float64) ** 2

    def plan(own: np.ndarray) -> Plan:
        capacities = np.full(ranks, own.sum() // ranks) + (np.arange(ranks) < own.sum() % ranks)
        return scheduler.plan(own, capacities, mask)

    cut = cut_chain(lengths, loads, micro_batches, in_turn=len(lengths) % 2 == 0)
    return plan_chain(cut, lengths, loads, plan, ping_pong)


@given(
    documents(most_ranks=6),
    st.sampled_from(list(SCHEDULERS)),
    st.sampled_from([Mask(), Mask(0), Mask(60), Mask(400), Mask(None, 128), Mask(None, 384)]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1, 1, 2, 3]),
    st.booleans(),
)
def test_plans_of_all_cover_every_pair_once(
    drawn, name, mask, stages, pooled, micro_batches, ping_pong
) -> None:
    """`validate` sees to each part by itself; together they have all pairs of all documents.

    The parts are ping and pong, or micro-batches of a chain, or both."""
    lengths = divisible(drawn[0], micro_batches * (2 if ping_pong else 1))
    ranks = min(len(drawn[1]), max(1, int(lengths.sum()) // (4 * micro_batches)))
    if not len(lengths):
        return
    config = ScheduleConfig()
    chain = planned(lengths, ranks, mask, name, config, micro_batches, ping_pong)
    servers = np.arange(stages * ranks).reshape(stages, ranks)
    scheduler = make_scheduler(name, config) if pooled and stages > 1 else None

    def move(plan: Plan) -> Plan:
        return move_tiles(plan, config)

    pairs, lent = 0, []
    for number, (of_nano_batches, plans) in enumerate(chain):
        for nano_number, (pieces, nano) in enumerate(zip(of_nano_batches, plans, strict=True)):
            # The same micro-batch in the first and the last stage, and none between.
            of_stages = [nano if n in (0, stages - 1) else None for n in range(stages)]
            plan = join_stages(of_stages, servers, scheduler, move if name in BALANCING else None)
            validate_plan(plan)
            assert plan.own_tokens_per_rank().sum() == pieces.lengths.sum() * min(stages, 2)
            assert (nano.first_positions == pieces.start).all()
            pairs += int(plan.loads().sum())
            assert (plan.loads_at_home().sum()) == plan.loads().sum()
            assert set(nano.borrows) <= set(lent)
            if nano.lends is not None:
                lent.append((number, nano_number))
    everything = mask.pairs(np.zeros_like(lengths), lengths, np.zeros_like(lengths), lengths)
    assert pairs == int(everything.sum()) * min(stages, 2)


def test_a_crossing_document_is_balanced() -> None:
    """One document: pong has three quarters of the pairs, evenly on all servers."""
    config = ScheduleConfig()
    lengths = np.array([16_384])
    ((_, nano),) = planned(lengths, 4, Mask(), "tiles", config)
    servers = np.arange(4).reshape(1, 4)
    plan = join_stages([nano[1]], servers, None, lambda p: move_tiles(p, config))
    validate_plan(plan)
    assert plan.cached_prefix is not None
    assert plan.cached_prefix[0] == 8192
    loads = plan.loads()
    assert loads.max() <= 1.1 * loads.mean()
    assert loads.sum() == Mask().pairs(8192, 16_384, 0, 16_384)


def test_such_plans_are_saved_and_checked(tmp_path) -> None:
    ((_, nano),) = planned(np.array([2048]), 2, Mask(), "tiles", ScheduleConfig())
    plan = join_stages([nano[1]], np.arange(2).reshape(1, 2))
    save_plan(plan, tmp_path / "plan.json")
    loaded, _ = load_plan(tmp_path / "plan.json")
    assert (loaded.cached_prefix == plan.cached_prefix).all()
    for change, message in (
        (np.array([900]), "a piece is only in part cached"),
        (np.array([2048]), "a document has no query"),
        (None, "not all covered"),
    ):
        with pytest.raises(ValueError, match=message):
            validate_plan(Plan(plan.lengths, plan.placement, plan.tasks, cached_prefix=change))
