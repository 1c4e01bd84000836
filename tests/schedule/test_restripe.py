"""Moves after a prefill: equal shares, few rows, and every row held once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.cost.model_sizes import MODELS
from distca.plan import Placement
from distca.plan.span import Int64s
from distca.schedule.serving import held_after, nobody_holds, shard_evenly, shard_in_stripes
from distca.schedule.serving.holdings import Holdings
from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.restripe import restripe
from distca.simulate import CLUSTERS
from distca.simulate.serving import InferenceCosts, simulate_restripe


def rows_of(held: Placement, sequences: int) -> Int64s:
    """Rows of each sequence on each rank."""
    return np.stack([held.select(held.document == n).tokens_per_rank() for n in range(sequences)])


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    before=st.integers(0, 90),
    weights=st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5),
    stripe=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_shares_are_equal_up_to_a_stripe(
    lengths: list[int], before: int, weights: list[float], stripe: int, seed: int
) -> None:
    ranks, numbers = len(weights), np.arange(len(lengths))
    starts = np.full(len(lengths), before)
    ends = starts + lengths
    held = nobody_holds(ranks)
    if before:
        held = held_after(held, shard_in_stripes(0 * starts, starts, numbers, stripe, ranks))
    shares = tuple(each / sum(weights) for each in weights)
    # A chain, or parts on any ranks.
    new = Chain(ranks, shares)(starts, ends)
    if seed % 2:
        rank = np.random.default_rng(seed).integers(0, ranks, len(new.rank))
        new = Placement(new.document, new.start, new.end, rank, ranks)
    whole = held_after(held, new)
    had = rows_of(whole, len(lengths))
    earlier = rows_of(held, len(lengths)) if before else 0 * had
    move = restripe(tuple(numbers.tolist()), whole, new, stripe)
    if move is None:
        after = had
    else:
        after = move.rows(move.after)
        assert (move.rows(move.before) == had).all()
        positions = np.sort(move.after.document * 1000 + move.after.start)
        assert (rows_of(move.after, len(lengths)).sum(axis=1) == ends).all()
        assert len(np.unique(positions)) == len(positions)
        # No more rows than the surplus travel, none of the earlier ones, and in whole stripes.
        surplus = np.maximum(had - after, 0)
        assert move.segments.moved()[2].sum() == surplus.sum()
        assert (surplus % stripe == 0).all()
        moved = move.segments.select(move.segments.owner != move.segments.server)
        of_sequence = np.searchsorted(move.offsets, moved.start, side="right") - 1
        assert (moved.start - move.offsets[of_sequence] >= before).all()
        known = Holdings(ranks, stripe)
        known.note([*numbers.tolist()], whole)
        for number in numbers.tolist():
            known.forget_from(number, before)
        known.note([*numbers.tolist()], move.new)
        lines = known.lines([*numbers.tolist()])
        assert (known.rows(lines, known.lengths(lines)) == after).all()
    assert (after >= earlier).all()
    # Earlier rows, which stay, are even up to a stripe themselves.
    assert (np.ptp(after, axis=1) <= (2 * stripe - 1 if before else stripe)).all()


def test_zigzag_and_an_even_chain_move_nothing() -> None:
    start, end = np.array([0]), np.array([960])
    for new in (shard_evenly(start, end, 3), Chain(3, (1 / 3,) * 3)(start, end)):
        assert restripe((0,), held_after(nobody_holds(3), new), new, 16) is None


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_simulated_bytes_are_those_of_the_rows(tensor_parallel: int) -> None:
    new = Chain(2, (0.75, 0.25))(np.array([0]), np.array([1600]))
    move = restripe((7,), held_after(nobody_holds(2), new), new, 16)
    assert move is not None
    costs = InferenceCosts(MODELS["llama-8b"], CLUSTERS["dgx-h100"], tensor_parallel)
    seconds, nbytes = simulate_restripe(move, costs)
    # Half of the tokens' difference, keys and values of 8 heads of 128 in 16 bits.
    assert nbytes == 400 * 2 * 8 * 128 * 2 * 32
    assert nbytes == move.bytes_by_sequence(costs.shape).sum() * 32 * tensor_parallel
    assert seconds > nbytes / tensor_parallel / costs.cluster.node_bytes_per_second
