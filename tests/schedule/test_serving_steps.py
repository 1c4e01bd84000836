"""Plans of inference: every visible pair once, and keys where earlier steps left them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.steps import stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, load_stepped_plan, save_plan, validate_stepped_plan
from distca.plan.span import Int64s
from distca.schedule.serving import (
    STRATEGIES,
    Strategy,
    held_after,
    nobody_holds,
    rings,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16)


@settings(max_examples=80)
@given(st.data())
def test_any_turns_have_valid_plans(data: st.DataObject) -> None:
    """Prompts and decoded tokens of several sequences in any order, on any ranks."""
    ranks, sequences = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    window = data.draw(st.none() | st.integers(0, 30))
    held, at = nobody_holds(ranks), np.zeros(sequences, dtype=np.int64)
    for _ in range(data.draw(st.integers(1, 4))):
        counts = st.lists(st.integers(1, 40), min_size=sequences, max_size=sequences)
        ends = at + np.array(data.draw(counts))
        way = data.draw(st.sampled_from(["evenly", "anywhere", "in stripes"]))
        if way == "evenly":
            new = shard_evenly(at, ends, ranks)
        elif way == "anywhere":
            owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=9, max_size=9))
            new = Placement(np.arange(sequences), at, ends, np.array(owners[:sequences]), ranks)
        else:
            stripe = data.draw(st.integers(1, 20))
            new = shard_in_stripes(at, ends, np.arange(sequences), stripe, ranks)
        for strategy in STRATEGIES:
            plan = step_plan(held, new, strategy, Mask(window), block=8)
            validate_stepped_plan(plan)
            assert plan.plan.own_tokens_per_rank().tolist() == new.tokens_per_rank().tolist()
            moved = stepped_bytes(plan, SHAPE).phases
            if strategy == "pass-kv" or (window is not None and (ends - at).max() > 1):
                assert not moved["combine"].any()
            else:
                # Keys stay: what travels to servers are queries alone.
                assert moved["dispatch"].sum() % SHAPE.q_row_bytes == 0
                assert not plan.kv_segments.moved_rows(ranks).any()
            stepped = step_plan(held, new, strategy, Mask(window), block=8, in_steps=True)
            validate_stepped_plan(stepped)
            # A server is sent the same rows, whoever passes them on.
            by_server = stepped_bytes(stepped, SHAPE).messages["dispatch"].received()
            assert by_server.tolist() == moved["dispatch"].sum(axis=0).tolist()
            assert np.array_equal(stepped_bytes(stepped, SHAPE).phases["combine"], moved["combine"])
        after = held_after(held, new)
        whole = held.tokens_per_rank() + new.tokens_per_rank()
        assert after.tokens_per_rank().tolist() == whole.tolist()
        held, at = after, ends


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_fresh_prompt_goes_round_the_ring(ranks: int, strategy: Strategy) -> None:
    """Between neighbours alone, in N - 1 steps, and just the rows that are seen."""
    tokens = 2 * ranks * 10
    new = shard_evenly(np.array([0]), np.array([tokens]), ranks)
    plan = step_plan(nobody_holds(ranks), new, strategy, Mask(), 8, in_steps=True)
    assert plan.steps == ranks
    travels = [each.kv if strategy == "pass-kv" else each.q for each in plan.step_segments]
    moved = [each.moved() for each in travels]
    assert all(((source - server) % ranks == 1).all() for source, server, _ in moved)
    assert sum(int(rows.sum()) for _, _, rows in moved) == (ranks - 1) * tokens * 3 // 4
    # Every server has as much work in every step but the first, which has half its squares.
    pairs = [plan.select(plan.step == step).plan.loads().tolist() for step in range(1, ranks)]
    assert pairs == [[2 * 10 * 10] * ranks] * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_gather_sends_all_keys_to_all_ranks(ranks: int, tmp_path: Path) -> None:
    """At once, those of earlier turns, too; and ranks compute what they would without."""
    start, end = np.array([90, 0]), np.array([120, 75])
    held = Placement(*(np.array([each]) for each in (0, 0, 90, 0)), ranks)
    new = shard_evenly(start, end, ranks)
    plan, ring = (
        step_plan(held, new, strategy, Mask(), 8, in_steps=True)
        for strategy in ("all-gather", "pass-kv")
    )
    validate_stepped_plan(plan)
    assert plan.steps == 1
    assert plan.plan.loads().tolist() == ring.plan.loads().tolist()
    moved = stepped_bytes(plan, SHAPE)
    assert moved.total == (ranks - 1) * (120 + 75) * SHAPE.kv_row_bytes
    save_plan(plan, tmp_path / "plan.json")
    assert stepped_bytes(load_stepped_plan(tmp_path / "plan.json")[0], SHAPE).total == moved.total


def test_no_rank_is_a_hot_sender() -> None:
    """One holds all earlier keys: it sends them once, a share in a step; others pass them on."""
    ranks, earlier = 4, 8000
    held = Placement(*(np.array([each]) for each in (0, 0, earlier, 2)), ranks)
    new = shard_evenly(np.array([earlier]), np.array([earlier + 400]), ranks)
    direct, stepped = (
        step_plan(held, new, "pass-kv", Mask(), in_steps=each) for each in (False, True)
    )
    assert stepped_bytes(direct, SHAPE).sent().max() > 3 * earlier * SHAPE.kv_row_bytes
    assert stepped_bytes(stepped, SHAPE).sent().max() < 1.1 * earlier * SHAPE.kv_row_bytes
    of_steps = [each.kv.moved_per_rank(ranks)[0].max() for each in stepped.step_segments]
    assert max(of_steps) < 1.5 * earlier / ranks
    assert len(of_steps) == 7


def test_all_that_a_rank_holds_counts_for_its_shares() -> None:
    """Wherever in the sequence it lies: 200 of 232 rows are three shares, which end in step 3."""
    start, end = np.array([0, 8, 24, 136, 152]), np.array([8, 24, 136, 152, 232])
    owners = np.array([0, 1, 0, 2, 0])
    held = Placement(np.zeros(5, dtype=np.int64), start, end, owners, 3)
    new = shard_evenly(np.array([232]), np.array([280]), 3)
    stepped = step_plan(held, new, "pass-kv", Mask(), block=8, in_steps=True)
    sent = [each.kv.moved_per_rank(3)[0] for each in stepped.step_segments]
    assert len(sent) == 4
    # No rank sends all that the first holds at once.
    assert 72 <= max(each.max() for each in sent) <= 120


def test_shares_of_what_a_rank_holds_are_numbered_from_0() -> None:
    """Of each sequence: the first rank holds three shares of both, the others less than one."""
    document, rank = np.repeat([0, 1], 5), np.tile([0, 1, 2, 3, 3], 2)
    start, end = np.tile([0, 384, 416, 448, 480], 2), np.tile([384, 416, 448, 480, 496], 2)
    held = Placement(document, start, end, rank, 4)
    pieces, share = rings._in_even_shares(held, held.select(start == 480), 16)
    for key in {*zip(pieces.document.tolist(), pieces.rank.tolist(), strict=True)}:
        mine = (pieces.document == key[0]) & (pieces.rank == key[1])
        assert {*share[mine].tolist()} == {*range(3 if key[1] == 0 else 1)}, key


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_are_as_small_whatever_the_stripes_of_decoding(strategy: Strategy) -> None:
    """A rank's keys are one piece to all new queries, and go round the ring as one."""
    ranks, zero, start = 3, np.array([0]), np.array([3072])
    new, found = shard_evenly(start, start + 60, ranks), []
    for stripe in (1, 16, 128):
        held = shard_in_stripes(zero, start, zero, stripe, ranks)
        plan = step_plan(held, new, strategy, Mask(), in_steps=True)
        validate_stepped_plan(plan)
        travels = plan.step_segments[1].kv if strategy == "pass-kv" else plan.step_segments[1].q
        assert ((travels.owner - travels.server) % ranks <= 1).all()
        found.append((len(plan.plan.placement.rank), plan.plan.tasks.server.tolist()))
        # Of keys before a window, too.
        windowed = step_plan(held, new, strategy, Mask(99), in_steps=True).plan
        assert len(windowed.placement.rank) <= 3 + 99 // stripe + 2 + len(new.rank)
    assert found[0] == found[1] == found[2]
    assert len(found[0][1]) < 40


def test_under_a_window_keys_travel_while_those_at_home_are_seen() -> None:
    new = shard_evenly(np.array([0]), np.array([1200]), 3)
    plan = step_plan(nobody_holds(3), new, "pass-kv", Mask(40), 16, in_steps=True)
    validate_stepped_plan(plan)
    moved = [each.kv.moved_per_rank(3)[1].tolist() for each in plan.step_segments]
    # The last rank's two pieces are neighbours.
    assert moved == [[0, 0, 0], [40, 80, 40]]
    first = plan.select(plan.step == 0).plan
    assert first.loads().sum() > 0.7 * plan.plan.loads().sum()
    # Nothing lies before the first piece, so all of it is in the first step.
    assert plan.step[plan.plan.tasks.q_start == 0].tolist() == [0]


def test_under_a_window_one_token_of_another_rank_is_waited_for() -> None:
    document, start, end = np.array([0, 0]), np.array([0, 1]), np.array([1, 200])
    new = Placement(document, start, end, np.array([0, 1]), 2)
    plan = step_plan(nobody_holds(2), new, "pass-kv", Mask(40), 16, in_steps=True)
    tasks = plan.plan.tasks
    spans = zip(plan.step.tolist(), tasks.q_start.tolist(), tasks.q_end.tolist(), strict=True)
    # Queries up to 40 see the token, and cuts fall on multiples of 16.
    assert sorted(spans) == [(0, 0, 1), (0, 48, 200), (1, 1, 48)]


def decoded(ranks: int, stripe: int, tokens: int, sequences: int) -> list[Int64s]:
    """Rows of each rank after so many decoded tokens of each of so many sequences."""
    held = [nobody_holds(ranks) for _ in range(sequences)]
    for position in range(tokens):
        for number in range(sequences):
            start = np.array([position])
            new = shard_in_stripes(start, start + 1, np.array([number]), stripe, ranks)
            held[number] = held_after(held[number], new)
    return [each.tokens_per_rank() for each in held]


@pytest.mark.parametrize("stripe", [1, 3, 16])
def test_decoding_fills_ranks_evenly(stripe: int) -> None:
    """Ranks differ by a stripe a sequence at most, and sequences begin on different ranks."""
    rows = decoded(3, stripe, 50, 3)
    assert all(each.max() - each.min() <= stripe for each in rows)
    total = np.sum(rows, axis=0)
    assert total.max() - total.min() <= stripe
    assert [int(each.argmax()) for each in decoded(3, stripe, 1, 3)] == [0, 1, 2]


def test_a_turn_shards_its_new_tokens_alone() -> None:
    """All ranks own equally many new tokens, whoever holds those before."""
    held = Placement(*(np.array([each]) for each in (0, 0, 100, 2)), 3)
    new = shard_evenly(np.array([100]), np.array([160]), 3)
    assert new.tokens_per_rank().tolist() == [20, 20, 20]
    plan = step_plan(held, new, "pass-q", Mask())
    # Two ranks send their queries to the one that holds all, and all share the new keys' work.
    assert plan.plan.q_segments.moved_rows(3)[[0, 1], 2].tolist() == [20, 20]
    assert held_after(held, new).tokens_per_rank().tolist() == [20, 20, 120]


def test_fewer_tokens_than_ranks_leave_ranks_without() -> None:
    new = shard_evenly(np.array([0, 5]), np.array([1, 5]), 4)
    assert new.tokens_per_rank().sum() == 1
    assert set(new.document.tolist()) == {0}


def test_a_stripe_is_positive() -> None:
    with pytest.raises(ValueError, match="stripe 0"):
        shard_in_stripes(np.array([0]), np.array([1]), np.array([0]), 0, 2)
