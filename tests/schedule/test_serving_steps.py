"""Plans of inference: every visible pair once, and keys where earlier steps left them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Placement
from distca.plan.span import Int64s
from distca.schedule.serving import (
    STRATEGIES,
    held_after,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_turns_have_valid_plans(data: st.DataObject) -> None:
    """Prompts and decoded tokens of several sequences in any order, on any ranks."""
    ranks, sequences = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    window = data.draw(st.none() | st.integers(0, 30))
    held, at = nobody_holds(ranks), np.zeros(sequences, dtype=np.int64)
    for _ in range(data.draw(st.integers(1, 4))):
        counts = st.lists(st.integers(1, 40), min_size=sequences, max_size=sequences)
        ends = at + np.array(data.draw(counts))
        if data.draw(st.booleans()):
            new = shard_evenly(at, ends, ranks)
        else:
            stripe = data.draw(st.integers(1, 20))
            new = shard_in_stripes(at, ends, np.arange(sequences), stripe, ranks)
        for strategy in STRATEGIES:
            plan = step_plan(held, new, strategy, Mask(window), block=8)
            plan.validate()
            assert plan.own_tokens_per_rank().tolist() == new.tokens_per_rank().tolist()
            moved = plan_bytes(plan, SHAPE).forward().phases
            if strategy == "pass-kv" or window is not None:
                assert not moved["return"].any()
            else:
                # Keys stay: what travels to servers are queries alone.
                assert moved["dispatch"].sum() % SHAPE.q_row_bytes == 0
                assert not plan.kv_segments.moved_rows(ranks).any()
        after = held_after(held, new)
        whole = held.tokens_per_rank() + new.tokens_per_rank()
        assert after.tokens_per_rank().tolist() == whole.tolist()
        held, at = after, ends


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
    assert plan.q_segments.moved_rows(3)[[0, 1], 2].tolist() == [20, 20]
    assert held_after(held, new).tokens_per_rank().tolist() == [20, 20, 120]


def test_fewer_tokens_than_ranks_leave_ranks_without() -> None:
    new = shard_evenly(np.array([0, 5]), np.array([1, 5]), 4)
    assert new.tokens_per_rank().sum() == 1
    assert set(new.document.tolist()) == {0}


def test_a_stripe_is_positive() -> None:
    with pytest.raises(ValueError, match="stripe 0"):
        shard_in_stripes(np.array([0]), np.array([1]), np.array([0]), 0, 2)
