"""Partitions of a prompt over a chain: cut, searched, looked up."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.cost.steps import stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, validate_stepped_plan
from distca.plan.span import Floats, Int64s
from distca.schedule.serving import held_after, nobody_holds, partitions, shard_evenly, step_plan
from distca.schedule.serving.partitions import (
    Chain,
    PartitionTable,
    check_shares,
    cut_prompt,
    even_shares,
    load_partitions,
    search_partition,
    shard_in_chain,
    shares_behind,
)
from distca.simulate.serving.prefill_chain import ChainCosts


@given(
    tokens=st.integers(1, 3000),
    weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=9),
    multiple=st.sampled_from([1, 16, 128]),
)
def test_every_rank_has_tokens_while_there_are_any(
    tokens: int, weights: list[float], multiple: int
) -> None:
    shares = [each / sum(weights) for each in weights]
    parts = cut_prompt(tokens, shares, multiple)
    assert parts.sum() == tokens
    assert len(parts) == len(shares)
    if tokens >= len(shares):
        assert (parts > 0).all()
    else:
        assert parts.tolist() == [1] * tokens + [0] * (len(shares) - tokens)


def test_cuts_fall_on_multiples_and_near_the_shares() -> None:
    parts = cut_prompt(10_000, (0.35, 0.255, 0.21, 0.185), 128)
    cuts = np.cumsum(parts)[:-1]
    assert (cuts % 128 == 0).all()
    assert np.abs(cuts - [3500, 6050, 8150]).max() <= 64
    # A share of less than a token has one.
    assert cut_prompt(20, (0.9, 0.001, 0.099)).tolist() == [18, 1, 1]
    # A rank would be left with half a multiple.
    assert cut_prompt(40, (1 / 3, 1 / 3, 1 / 3), 16).tolist() == [13, 14, 13]


def busiest(parts: Int64s) -> Floats:
    """Seconds that a chain without links takes: the most of any rank's work."""
    part = parts.astype(np.float64)
    work: Floats = (part * np.cumsum(part, axis=1) + 3 * part).max(axis=1)
    return work


@pytest.mark.parametrize(("tokens", "ranks"), [(2, 2), (37, 2), (40, 3), (24, 4)])
def test_the_search_finds_what_trying_all_partitions_finds(tokens: int, ranks: int) -> None:
    cuts = np.array(list(itertools.combinations(range(1, tokens), ranks - 1)), dtype=np.int64)
    every = np.diff(cuts, axis=1, prepend=0, append=np.full((len(cuts), 1), tokens))
    found = search_partition(tokens, ranks, busiest)
    assert found.sum() == tokens
    assert busiest(found[None])[0] == busiest(every).min()


@pytest.mark.parametrize("ranks", [8, 9, 32])
def test_the_search_goes_on_where_a_grid_would_be_too_large(ranks: int) -> None:
    found = search_partition(9000, ranks, busiest, finest=10)
    work = (found * np.cumsum(found) + 3 * found).astype(float)
    assert work.max() < 1.05 * work.mean()
    even = busiest(cut_prompt(9000, even_shares(ranks))[None])[0]
    assert work.max() < 0.65 * even


def test_a_chain_longer_than_the_prompt_is_not_searched() -> None:
    with pytest.raises(ValueError, match="shorten the chain"):
        search_partition(3, 4, busiest)
    assert search_partition(5, 1, busiest).tolist() == [5]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((0.5, 0.0, 0.5), "a share above 0"),
        ((1.5, -0.5), "a share above 0"),
        ((0.5, 0.4), "add up to 0.9"),
        ((), "above 0"),
    ],
)
def test_what_is_no_partition_is_refused(shares: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_shares(shares)


TABLE = PartitionTable("m", "h", 2, {1000: (0.6, 0.4), 3000: (0.7, 0.3)})


def test_shares_between_two_lengths_are_interpolated() -> None:
    assert TABLE.at(2000) == pytest.approx((0.65, 0.35))
    assert TABLE.at(10) == TABLE.shares[1000]
    assert TABLE.at(99_999) == TABLE.shares[3000]
    assert TABLE.covers(1000)
    assert not TABLE.covers(3001)


def test_a_saved_table_is_read_again(tmp_path: Path) -> None:
    tried = {1000: {(600, 400): 0.5, (1000, 0): 2.0}}
    for table in (TABLE, replace(TABLE, by="cpu", trials=tried)):
        table.save(tmp_path / "deep" / "table.json")
        assert load_partitions(tmp_path / "deep" / "table.json") == table


def test_a_table_of_an_interrupted_search_has_no_chain_yet() -> None:
    with pytest.raises(ValueError, match="needs those of one length"):
        replace(TABLE, shares={})
    begun = replace(TABLE, shares={}, trials={1000: {(600, 400): 0.5}})
    with pytest.raises(ValueError, match="its search was interrupted"):
        Chain(2, begun)


def test_one_rank_is_chosen_where_a_chain_is_no_faster() -> None:
    fast, slow = (ChainCosts(1e-5, 1e-9, 4, 4096, (speed,) * 2) for speed in (100.0, 1e-3))
    assert (search_partition(4096, 3, fast.chain_seconds, 16) > 0).all()
    assert search_partition(4096, 3, slow.chain_seconds, 16).tolist() == [4096, 0, 0]
    # Shares of 0 at the end shorten a chain; elsewhere they are none.
    assert cut_prompt(10, (0.5, 0.5, 0.0)).tolist() == [5, 5, 0]
    assert cut_prompt(2, (1.0, 0.0, 0.0)).tolist() == [2, 0, 0]
    table = PartitionTable("m", "h", 3, {1000: (1.0, 0.0, 0.0), 3000: (0.5, 0.3, 0.2)})
    assert table.at(1900) == (1.0, 0.0, 0.0)
    assert table.at(2100) == table.at(9999) == (0.5, 0.3, 0.2)
    with pytest.raises(ValueError, match="a share above 0"):
        PartitionTable("m", "h", 3, {1000: (0.5, 0.0, 0.5)})


def test_few_partitions_are_nearly_as_good() -> None:
    tried: set[tuple[int, ...]] = set()

    def seconds(parts: Int64s) -> Floats:
        tried.update(map(tuple, parts.tolist()))
        return busiest(parts)

    found = search_partition(8192, 4, seconds, 128, few=True)
    assert busiest(found[None])[0] < 1.05 * busiest(search_partition(8192, 4, busiest)[None])[0]
    assert len(tried) < 60
    assert tuple(cut_prompt(8192, even_shares(4)).tolist()) in tried


def test_every_part_can_give_to_every_other() -> None:
    """Also where few partitions are tried, none of which begins near the best."""
    for wanted in ((10, 10, 20, 40), (40, 20, 10, 10), (10, 40, 10, 20)):

        def seconds(parts: Int64s, wanted: tuple[int, ...] = wanted) -> Floats:
            far: Floats = np.abs(parts - np.array(wanted)).sum(axis=1) + 1.0
            return far

        assert tuple(search_partition(80, 4, seconds, few=True).tolist()) == wanted


@given(
    weights=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5),
    start=st.integers(0, 900),
    new=st.integers(1, 900),
)
def test_what_follows_cached_tokens_is_cut_into_equal_work(
    weights: list[float], start: int, new: int
) -> None:
    """By the density of work that the whole prompt's partition tells."""
    shares, end = tuple(each / sum(weights) for each in weights), start + new
    found = np.array(shares_behind(shares, start, end))
    assert found.sum() == pytest.approx(1)
    edges = start + np.cumsum([0, *found]) * new
    work = np.interp(edges / end, np.cumsum([0, *shares]), np.arange(len(shares) + 1))
    assert np.diff(work) == pytest.approx(np.diff(work).mean())
    assert shares_behind((*shares, 0.0), start, end)[-1] == 0


def test_far_behind_cached_tokens_parts_are_nearly_even() -> None:
    assert Chain(2, TABLE).shares(90_000, 91_000) == pytest.approx((0.5, 0.5))
    assert Chain(2, (0.7, 0.3)).shares(0, 10) == (0.7, 0.3)
    assert Chain(2, (0.7, 0.3)).shares(7, 14)[0] > 0.5


NO_SECONDS = (
    '{"format": 1, "model": "m", "hardware": "h", "ranks": 2, "shares": {"100": [0.6, 0.4]}, '
    '"by": "cpu", "trials": {"100": [[[60, 40], NaN]]}}'
)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "shares": []}', NO_SECONDS]
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(ValueError, match="distca tune partitions"):
        load_partitions(tmp_path / "table.json")


@pytest.mark.parametrize(
    ("given", "said"),
    [(("n", "h", 2), "model m, not n"), (("m", "g", 2), "hardware h"), (("m", "h", 4), "ranks 2")],
)
def test_a_table_for_others_is_refused(given: tuple[str, str, int], said: str) -> None:
    TABLE.check("m", "h", 2)
    with pytest.raises(ValueError, match=said):
        TABLE.check(*given)


def test_a_table_with_another_number_of_shares_is_refused() -> None:
    with pytest.raises(ValueError, match="among 3 ranks"):
        PartitionTable("m", "h", 2, {10: (0.4, 0.3, 0.3)})


SHAPE = AttentionShape(1, 1, 8, 2)


def chain(parts: list[int], held: Placement | None = None) -> Placement:
    end = np.array([sum(parts)])
    start = np.zeros_like(end) if held is None else np.array([held.end.max()])
    shares = tuple(part / sum(parts) for part in parts)
    return Chain(len(parts), shares)(start, start + end)


@pytest.mark.parametrize(
    ("parts", "products", "rows"), [([3, 3, 3], [9, 18, 27], 18), ([4, 3, 2], [16, 21, 18], 22)]
)
def test_a_chains_plan_has_the_papers_counts(
    parts: list[int], products: list[int], rows: int
) -> None:
    new = chain(parts)
    assert (new.end - new.start).tolist() == parts
    plan = step_plan(nobody_holds(3), new, "pass-kv", Mask(), block=1, in_steps=True)
    validate_stepped_plan(plan)
    tasks = plan.plan.tasks
    of_server = np.zeros(3, dtype=np.int64)
    whole = (tasks.q_end - tasks.q_start) * (tasks.kv_end - tasks.kv_start)
    np.add.at(of_server, tasks.server, whole)
    assert of_server[::-1].tolist() == products
    moved = stepped_bytes(plan, SHAPE).messages["dispatch"]
    # The paper counts rows of keys and rows of values.
    assert 2 * moved.sizes.sum() == rows * SHAPE.kv_row_bytes
    # Each hands all that it has to the next one down.
    assert (moved.source - moved.destination == 1).all()


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3).filter(any),
    before=st.integers(0, 200),
    weights=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5),
    window=st.sampled_from([None, 40]),
)
def test_chains_over_cached_tokens_cover_each_pair_once(
    lengths: list[int], before: int, weights: list[float], window: int | None
) -> None:
    ranks, fed = len(weights), [length for length in lengths if length]
    held = nobody_holds(ranks)
    zeros = np.zeros(len(fed), dtype=np.int64)
    if before and before % 2:
        held = held_after(held, shard_evenly(zeros, zeros + before, ranks))
    elif before:
        # Pieces of any lengths on any ranks.
        random = np.random.default_rng(before)
        cuts = np.unique([0, *random.integers(0, before, 5), before])
        document = np.repeat(np.arange(len(fed)), len(cuts) - 1)
        start, end = (np.tile(each, len(fed)) for each in (cuts[:-1], cuts[1:]))
        rank = random.integers(0, ranks, len(start))
        held = held_after(held, Placement(document, start, end, rank, ranks))
    shares = [weight / sum(weights) for weight in weights]
    ends = zeros + before + np.array(fed)
    new = shard_in_chain(zeros + before, ends, ranks, lambda *_: shares, 16)
    plan = step_plan(held, new, "pass-kv", Mask(window), block=16, in_steps=True)
    validate_stepped_plan(plan)
    assert plan.plan.own_tokens_per_rank().sum() == sum(fed)


def test_a_chain_is_among_the_ranks_that_there_are() -> None:
    assert Chain(2, TABLE).shares(0, 2000) == pytest.approx((0.65, 0.35))
    for partition in (TABLE, (0.5, 0.5)):
        with pytest.raises(ValueError, match="among 2 ranks, not 3"):
            Chain(3, partition)


@pytest.mark.parametrize("cuts", [1, 3, 6, 8, 15])
def test_cuts_move_both_ways_alike(cuts: int) -> None:
    """From nine ranks on, where a grid has too many points, too."""
    moves = np.round(partitions._moves(cuts), 9) + 0.0
    there = {tuple(each) for each in moves.tolist()}
    assert there == {tuple(each) for each in (0.0 - moves).tolist()}
    assert len(there) > 2 * cuts
