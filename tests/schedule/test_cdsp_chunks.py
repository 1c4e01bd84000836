"""Chunks on growing groups: the paper's examples, properties, and all that could be chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serving.cdsp_capacity import best_of_all
from distca.schedule.serving.cdsp import (
    PREFILL_STRATEGIES,
    TABLE_1,
    PrefillPlan,
    Search,
    plan_prefill,
    published_model,
)
from distca.schedule.serving.cdsp.groups import Groups, Ranks
from distca.schedule.serving.cdsp.strategies import strategy_of

MODEL = published_model()
NOBODY: Ranks = frozenset()


@dataclass(frozen=True)
class Measured:
    """The cells of Table 1, without a fit."""

    degrees: Sequence[int] = (1, 2, 4, 8, 16)

    def seconds(self, degree: int, cached: int, tokens: int) -> float:
        (cell,) = (e.seconds for e in TABLE_1 if (e.degree, e.tokens) == (degree, tokens))
        return cell

    def tokens_within(self, degree: int, cached: int, seconds: float) -> int:
        return 0


def after(queued: Sequence[float], plan: PrefillPlan) -> list[float]:
    """What ranks are queued for once the plan is theirs."""
    ranks = plan.chunks[-1].ranks
    return [plan.ttft if rank in ranks else each for rank, each in enumerate(queued)]


@pytest.mark.parametrize(
    ("strategy", "first", "second"), [("greedy", 1.53, 1.84), ("single-chunk", 1.58, 1.31)]
)
def test_a_larger_group_that_gains_little_costs_the_next_request(strategy, first, second) -> None:
    """Section 2.4: 32K and then 16K tokens, on 16 ranks that are all taken for a second."""
    search = Search(Measured(), improvement_rate=0.05)
    plan = PREFILL_STRATEGIES[strategy]
    queued = [1.0] * 16
    long = plan(search, queued, 8, 32 << 10)
    assert long.ttft == pytest.approx(first)
    short = plan(search, after(queued, long), 8, 16 << 10)
    assert short.ttft == pytest.approx(second)


def test_a_long_prompt_waits_for_a_short_one_or_runs_on_half_of_the_ranks() -> None:
    """Section 2.4: 128K tokens beside 16K on 8 of 16 ranks. CDSP does better than both."""
    queued = [0.31] * 8 + [0.0] * 8
    search = Search(Measured())
    assert PREFILL_STRATEGIES["greedy"](search, queued, 8, 128 << 10).ttft == pytest.approx(2.62)
    half = PREFILL_STRATEGIES["fixed-8"](search, queued, 8, 128 << 10)
    assert half.ttft == pytest.approx(3.96)
    # Between the two groups of 8 the time of the first chunk is 0.31 s, more than a prefill's 0.17.
    chunked = plan_prefill(Search(MODEL), queued, 8, 128 << 10)
    waiting = PREFILL_STRATEGIES["greedy"](Search(MODEL), queued, 8, 128 << 10)
    assert [len(chunk.ranks) for chunk in waiting.chunks] == [16]
    assert chunked.ttft <= waiting.ttft


def check(plan: PrefillPlan, queued: Sequence[float], tokens: int, cached: int = 0) -> None:
    """What every plan has."""
    before, end, total = NOBODY, 0.0, 0
    for chunk in plan.chunks:
        assert chunk.tokens > 0
        assert before < chunk.ranks or not before, "groups grow, and are nested"
        assert chunk.start >= max(end, max(queued[rank] for rank in chunk.ranks)) - 1e-9
        assert chunk.cached == cached + total
        before, end, total = chunk.ranks, chunk.end, total + chunk.tokens
    assert total == tokens
    assert plan.ttft == end


QUEUES = st.lists(st.floats(0, 20) | st.just(0.0), min_size=1, max_size=16)


@settings(max_examples=150)
@given(
    queued=QUEUES,
    tokens=st.integers(1, 400_000),
    rate=st.floats(0, 0.75),
    per_node=st.sampled_from([1, 3, 4, 8]),
)
def test_plans_are_legal_and_never_later_than_one_chunk(queued, tokens, rate, per_node) -> None:
    search = Search(MODEL, rate)
    plan = plan_prefill(search, queued, per_node, tokens)
    check(plan, queued, tokens)
    assert all(len(chunk.ranks) in MODEL.degrees for chunk in plan.chunks)
    assert all(chunk.tokens >= search.smallest_chunk for chunk in plan.chunks[:-1])
    single = PREFILL_STRATEGIES["single-chunk"](search, queued, per_node, tokens)
    check(single, queued, tokens)
    assert plan.ttft <= single.ttft
    assert plan.chunks[-1].ranks <= single.chunks[-1].ranks


def extended(order: Sequence[int], pool: Ranks, group: Ranks, degree: int, per_node: int) -> Ranks:
    """`GetGroup` by its words, on ranks in the order of their queues."""
    free = [rank for rank in order if rank in pool and rank not in group]
    nodes = {rank // per_node for rank in group}
    near = [rank for rank in free if rank // per_node in nodes]
    group = group | set(near[: degree - len(group)])
    if len(group) == degree:
        return group
    missing = degree - len(group)
    others: dict[int, list[int]] = {}
    for rank in free:
        if rank // per_node not in nodes:
            others.setdefault(rank // per_node, []).append(rank)
    whole = [n for n, ranks in others.items() if len(ranks) >= missing]
    if whole:
        node = min(whole, key=lambda n: order.index(others[n][missing - 1]))
        return group | set(others[node][:missing])
    node = min(others, key=lambda n: (-len(others[n]), order.index(others[n][-1])))
    return extended(order, pool, group | set(others[node]), degree, per_node)


def all_plans(
    queued: list[float],
    order: Sequence[int],
    per_node: int,
    tokens: int,
    cached: int,
    group: Ranks,
    degrees: Sequence[int],
    pool: Ranks,
    rate: float,
    per_rank: float,
) -> Iterator[float]:
    """Times to the first token of all that Algorithm 1 may choose, with Eq. 2 as it stands, where a
    rank holds so many tokens."""

    def latest(ranks: Ranks) -> float:
        return max(queued[rank] for rank in ranks)

    best, chosen = float("inf"), NOBODY
    for degree in degrees:
        if cached + tokens > degree * per_rank:
            continue
        ranks = extended(order, pool, group, degree, per_node)
        ttft = latest(ranks) + MODEL.seconds(degree, cached, tokens)
        if ttft < best * (1 - rate):
            best, chosen = ttft, ranks
    yield best
    legal = [degree for degree in degrees if degree <= len(chosen)]
    for now in legal:
        for then in (degree for degree in legal if degree > now):
            ranks = extended(order, chosen, group, now, per_node)
            budget = latest(extended(order, chosen, ranks, then, per_node)) - latest(ranks)
            length = min(tokens, MODEL.tokens_within(now, cached, budget))
            if not 128 <= length < tokens or cached + length > now * per_rank:
                continue
            spent = latest(ranks) + MODEL.seconds(now, cached, length)
            left = [max(0.0, each - spent) for each in queued]
            larger = [degree for degree in legal if degree >= then]
            for rest in all_plans(
                left,
                order,
                per_node,
                tokens - length,
                cached + length,
                ranks,
                larger,
                chosen,
                rate,
                per_rank,
            ):
                yield spent + rest


@pytest.mark.parametrize(
    ("seed", "bounded"), [*((seed, False) for seed in range(6)), (6, True), (7, True)]
)
def test_the_plan_is_the_best_of_the_algorithms_own_space(
    seed: int, bounded: bool, full: bool
) -> None:
    """On ranks that hold any number of tokens, or hardly more than the prompt needs."""
    drawn, chunks = np.random.default_rng(seed), []
    for _ in range(2000 if full else 60):
        count = int(drawn.choice([1, 2, 3, 4, 4, 4, 4]))
        queued = (drawn.uniform(0, 8, count) * (drawn.random(count) < 0.9)).tolist()
        tokens = int(drawn.integers(200, 300_000))
        rate, per_node = float(drawn.choice([0.0, 0.1, 0.4])), int(drawn.choice([1, 2, 4]))
        degrees = [degree for degree in MODEL.degrees if degree <= count]
        per_rank = tokens / degrees[-1] * drawn.uniform(1, 2) if bounded else float("inf")
        search = Search(MODEL, rate, tokens_per_rank=per_rank)
        plan = plan_prefill(search, queued, per_node, tokens)
        order = sorted(range(count), key=queued.__getitem__)
        found = all_plans(
            queued, order, per_node, tokens, 0, NOBODY, degrees, frozenset(order), rate, per_rank
        )
        assert plan.ttft == pytest.approx(min(found), rel=1e-9, abs=1e-9)
        chunks.append(len(plan.chunks))
    assert {1, 2, 3} <= set(chunks)


def test_free_chunk_lengths_and_groups_gain_little() -> None:
    """The gap to brute force over all nested groups, and lengths in sixteenths of the prompt."""
    drawn = np.random.default_rng(0)
    gaps = []
    for _ in range(12):
        queued = drawn.uniform(0, 8, 4).tolist()
        tokens = int(drawn.integers(8_000, 200_000))
        plan = plan_prefill(Search(MODEL), queued, 4, tokens)
        gaps.append(plan.ttft / best_of_all(MODEL, queued, tokens) - 1)
    assert min(gaps) > -0.05, "sixteenths are coarse, but the best of them is no later than that"
    assert np.mean(gaps) < 0.02


def test_ranks_are_chosen_on_few_nodes() -> None:
    #         node 0                node 1                node 2
    queued = [0.0, 5.0, 6.0, 7.0, 1.0, 1.1, 1.2, 9.0, 2.0, 2.0, 2.0, 2.0]
    groups = Groups(queued, 4)

    def extend(group: set[int], degree: int, pool: Ranks = groups.everyone) -> set[int]:
        return set(groups.extend(pool, frozenset(group), degree))

    assert extend(set(), 1) == {0}
    assert extend(set(), 2) == {4, 5}, "0 and 4 would be free as soon, but on two nodes"
    assert extend(set(), 4) == {8, 9, 10, 11}
    assert extend(set(), 8) == {0, 1, 2, 3, 8, 9, 10, 11}, "whole nodes"
    assert extend({0}, 2) == {0, 1}, "its own node first"
    assert extend({0}, 8) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert extend({0}, 6) == {0, 1, 2, 3, 4, 5}
    assert extend({0, 4}, 4) == {0, 4, 5, 6}
    assert extend(set(), 4, frozenset({0, 1, 4, 8, 9})) == {0, 1, 8, 9}, "the largest parts"


def test_a_cached_prefix_is_used_where_its_holders_are_free() -> None:
    search, prefix, new = Search(MODEL), 60_000, 4_000
    queued = [0.0] * 8
    plan = plan_prefill(search, queued, 8, new, prefix, frozenset({2, 5, 6}))
    check(plan, queued, new, prefix)
    assert {2, 5, 6} < plan.chunks[0].ranks
    assert plan.ttft < plan_prefill(search, queued, 8, prefix + new).ttft / 3
    queued[5] = 60.0
    plan = plan_prefill(search, queued, 8, new, prefix, frozenset({2, 5, 6}))
    check(plan, queued, prefix + new)
    assert 5 not in plan.chunks[0].ranks


def test_groups_may_be_bounded_where_few_ranks_suffice() -> None:
    search, queued = Search(MODEL, most_ranks=4), [0.0, 0.1, 0.2, 0.3] + [9.0] * 4
    plan = plan_prefill(search, queued, 8, 128 << 10)
    check(plan, queued, 128 << 10)
    assert [len(chunk.ranks) for chunk in plan.chunks] == [1, 2, 4]
    queued = [0.0] * 8
    assert len(plan_prefill(search, queued, 8, 128 << 10).chunks[-1].ranks) == 4
    small = replace(search, tokens_per_rank=20_000)
    assert len(plan_prefill(small, queued, 8, 128 << 10).chunks[-1].ranks) == 8
    holders = frozenset(range(5))
    plan = plan_prefill(search, queued, 8, 4_000, 200_000, holders)
    check(plan, queued, 4_000, 200_000)
    assert holders < plan.chunks[0].ranks


def test_bounds_on_chunks_are_exact() -> None:
    """The least that a chunk has, and the most that its ranks hold, with all tokens before it."""
    queued, fitting = [0.0, 4.0, 4.0, 4.0], MODEL.tokens_within(1, 0, 4.0)
    for smallest, degrees in ((fitting, [1, 4]), (fitting + 1, [4])):
        search = Search(MODEL, smallest_chunk=smallest)
        chunks = plan_prefill(search, queued, 4, 3 * fitting).chunks
        assert [len(chunk.ranks) for chunk in chunks] == degrees
    for per_rank, degrees in ((fitting, [1, 4]), (fitting - 1, [4])):
        search = Search(MODEL, tokens_per_rank=per_rank)
        chunks = plan_prefill(search, queued, 4, 3 * fitting).chunks
        assert [len(chunk.ranks) for chunk in chunks] == degrees
    queued, first = [0.0, 1.0, 9.0, 9.0], MODEL.tokens_within(1, 0, 1.0)
    second = MODEL.tokens_within(2, first, 8.0)
    for per_rank, degrees in ((-(-(first + second) // 2), [1, 2, 4]), (second // 2, [1, 4])):
        search = Search(MODEL, tokens_per_rank=per_rank)
        chunks = plan_prefill(search, queued, 4, 4 * per_rank).chunks
        assert [len(chunk.ranks) for chunk in chunks] == degrees


def test_prompts_need_ranks_that_hold_them() -> None:
    search = Search(MODEL, tokens_per_rank=50_000)
    queued = [0.0] * 4 + [9.0] * 4
    assert len(plan_prefill(search, queued, 8, 300_000).chunks[-1].ranks) == 8
    for chunk in plan_prefill(search, queued, 8, 300_000).chunks:
        assert chunk.cached + chunk.tokens <= 50_000 * len(chunk.ranks)
    for plan in (PREFILL_STRATEGIES["cdsp"], PREFILL_STRATEGIES["fixed-8"]):
        with pytest.raises(ValueError, match=r"prompt of 400001 tokens does not fit"):
            plan(search, queued, 8, 400_001)
    with pytest.raises(ValueError, match="8 ranks cannot form groups of 16"):
        PREFILL_STRATEGIES["fixed-16"](search, queued, 8, 1000)
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match="improvement rate"):
            replace(search, improvement_rate=rate)
    with pytest.raises(ValueError, match="smallest chunk 0"):
        replace(search, smallest_chunk=0)


def test_fixed_degrees_are_powers_of_two() -> None:
    assert strategy_of("fixed-4") is not None
    for name, said in (
        ("fixed-3", "not a power of two"),
        ("fixed-0", "not a power of two"),
        ("fixed-", "no strategy 'fixed-'"),
        ("4", "no strategy '4'"),
    ):
        with pytest.raises(ValueError, match=said):
            strategy_of(name)


def test_fixed_groups_go_on_from_what_they_hold_themselves() -> None:
    search, queued = Search(MODEL), [5.0] * 4 + [1.0] * 4
    plan = strategy_of("fixed-4")
    for holders, cached in ((frozenset({4, 6}), 1000), (frozenset({0}), 0), (frozenset(), 1000)):
        (chunk,) = plan(search, queued, 8, 9000, 1000, holders).chunks
        assert (chunk.cached, chunk.tokens, chunk.start) == (cached, 10_000 - cached, 1.0)
        assert chunk.ranks == {4, 5, 6, 7}
