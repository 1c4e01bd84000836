"""Chains and all-gathers, simulated: the times of KV-Runahead's paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.schedule.serving.partitions import cut_prompt, search_partition
from distca.simulate.serving.prefill_chain import (
    ChainCosts,
    fit_alone,
)

# Table 3, the column of one GPU: tokens and seconds of Llama 7B.
ALONE = {1024: 0.10, 2048: 0.24, 4096: 0.65, 8192: 1.95, 12288: 3.95}
TOKEN, PRODUCT = fit_alone([*ALONE], [*ALONE.values()])
LLAMA = ChainCosts(TOKEN, PRODUCT, 32, 2 * 4096 * 2, (300.0,) * 3)


def test_a_fit_reproduces_the_times_of_one_gpu() -> None:
    for tokens, seconds in ALONE.items():
        assert LLAMA.alone(tokens) == pytest.approx(seconds, rel=0.006)


def test_a_fit_needs_two_lengths_that_cost_more_and_more() -> None:
    with pytest.raises(ValueError, match="two lengths"):
        fit_alone([8, 8], [1.0, 1.0])
    with pytest.raises(ValueError, match="don't rise"):
        fit_alone([10, 100], [1.0, 1.0])


def test_the_searched_partition_is_the_published_one() -> None:
    found = search_partition(10 * 1024, 4, LLAMA.chain_seconds, 16)
    assert np.abs(found / found.sum() - [0.350, 0.255, 0.210, 0.185]).max() < 0.004


@pytest.mark.parametrize(
    ("tokens", "ranks", "published"),
    [(8192, 4, 0.54 / 0.41), (16384, 4, 1.76 / 1.24), (8192, 8, 0.30 / 0.22)],
)
def test_speed_ups_over_all_gathers_are_near_the_published(
    tokens: int, ranks: int, published: float
) -> None:
    costs = replace(LLAMA, gb_per_s=(300.0,) * (ranks - 1))
    found = search_partition(tokens, ranks, costs.chain_seconds, 64)
    ratio = costs.all_gather_seconds(tokens) / costs.chain_seconds(found[None])[0]
    assert ratio == pytest.approx(published, rel=0.11)


def test_one_rank_is_as_fast_as_it_is_alone() -> None:
    alone = replace(LLAMA, gb_per_s=())
    assert alone.chain_seconds(np.array([[777]]))[0] == pytest.approx(alone.alone(777))
    assert alone.all_gather_seconds(777) == alone.alone(777)


def test_links_only_delay_and_never_below_the_bound() -> None:
    parts = cut_prompt(8192, (0.35, 0.255, 0.21, 0.185))[None]
    seconds = [
        replace(LLAMA, gb_per_s=(speed,) * 3).chain_seconds(parts)[0]
        for speed in (np.inf, 300.0, 10.0, 1.0)
    ]
    assert LLAMA.lower_bound(8192) < seconds[0] < seconds[1] < seconds[2] < seconds[3]
    # A link that carries all rows, and nothing else counts: bytes over its speed.
    nothing = ChainCosts(0.0, 0.0, 3, 100.0, (1.0, 2.0))
    assert nothing.chain_seconds(np.array([[4, 3, 2]]))[0] == pytest.approx(
        max(3 * 4 * 100e-9 + 7 * 100e-9 / 2, 3 * 7 * 100e-9 / 2 + 4 * 100e-9), rel=0.35
    )


def test_a_slow_link_hurts_a_chain_less_than_an_all_gather() -> None:
    found = search_partition(8192, 4, LLAMA.chain_seconds, 64)[None]
    for slow in range(3):
        speeds = [300.0] * 3
        speeds[slow] = 150.0
        hurt = replace(LLAMA, gb_per_s=tuple(speeds))
        chain = hurt.chain_seconds(found)[0] / LLAMA.chain_seconds(found)[0]
        gather = hurt.all_gather_seconds(8192) / LLAMA.all_gather_seconds(8192)
        assert 1 <= chain < 1.001 < 1.02 < gather


def test_a_chain_searched_for_slow_links_loses_less_than_an_all_gather() -> None:
    """Where links are the limit, and one of them has half the others' speed."""
    even = replace(LLAMA, gb_per_s=(10.0,) * 3)
    best = search_partition(8192, 4, even.chain_seconds, 64)[None]
    chain, gather = [], []
    for slow in range(3):
        hurt = replace(even, gb_per_s=tuple(5.0 if link == slow else 10.0 for link in range(3)))
        found = search_partition(8192, 4, hurt.chain_seconds, 64)[None]
        chain.append(hurt.chain_seconds(found)[0] / even.chain_seconds(best)[0])
        gather.append(hurt.all_gather_seconds(8192) / even.all_gather_seconds(8192))
    assert 1 < np.mean(chain) < 1.3 < 1.39 < np.mean(gather)


def test_causal_kernels_leave_out_the_later_half_of_the_squares() -> None:
    causal = replace(LLAMA, causal=True, gb_per_s=(np.inf,) * 3, token_seconds=0.0)
    whole = replace(causal, causal=False)
    one = np.array([[1000, 1, 1, 1]])
    assert causal.alone(8) == pytest.approx(36 * PRODUCT)
    assert causal.chain_seconds(one)[0] < 0.51 * whole.chain_seconds(one)[0]


@pytest.mark.parametrize(
    "broken", [{"layers": 0}, {"gb_per_s": (0.0,) * 3}, {"latency": -1.0}, {"before_attention": 2}]
)
def test_costs_out_of_range_are_refused(broken: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"add up|above 0"):
        replace(LLAMA, **broken)
