"""The benchmark of prompts of unequal lengths: what it compares, and that it counts it right."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice

import numpy as np
import pytest

from benchmarks.serving import balanced_prompts
from benchmarks.serving.prompt_mixes import MIXES, Load, drawn, iterations, whole_requests
from distca.cost.kernel_time import AnalyticCost
from distca.cost.volume import AttentionShape
from distca.documents.lengths import Fixed
from distca.schedule.serving.scheduled import ScheduledTokens

COST = AnalyticCost(1.0, 1.0)
ARGS = Namespace(
    model="llama-8b", cluster="dgx-h100", chunk=8192, iterations=6, seed=0, replayed_iterations=1
)


def test_ranks_always_have_prompts() -> None:
    load = Load(4, 2048, 400_000, (3, 9), 128)
    found = iterations(load, drawn(MIXES["chat and long"], 100_000, 1), 12, 4)
    assert len(found) == 12
    for feeds in found:
        fed = np.zeros(4, dtype=np.int64)
        for each in feeds:
            (rank,) = {*each.ranks.tolist()}
            fed[rank] += each.count
        assert fed.tolist() == [2048] * 4
    assert any(each.count == 1 for feeds in found for each in feeds), "nothing is decoded"


def test_lengths_are_repeatable_and_bounded() -> None:
    first, again, other = (
        [*islice(drawn(MIXES["chat and long"], 50_000, seed), 3000)] for seed in (0, 0, 1)
    )
    assert first == again != other
    assert max(first) == 50_000
    assert np.mean(np.array(first) > 16_000) == pytest.approx(0.1, abs=0.02)
    assert np.median([*islice(drawn(MIXES["chat"], 50_000, 0), 3000)]) == pytest.approx(
        800, rel=0.1
    )


def test_whole_requests_go_to_the_rank_that_has_least() -> None:
    """The longest first; decoded tokens stay with their keys."""
    feeds = [
        ScheduledTokens(0, 0, 100, np.zeros(25, dtype=np.int64)),
        ScheduledTokens(1, 0, 90, np.zeros(23, dtype=np.int64)),
        ScheduledTokens(2, 0, 40, np.zeros(10, dtype=np.int64)),
        ScheduledTokens(3, 39, 1, np.zeros(10, dtype=np.int64)),
    ]
    moved = whole_requests(feeds, 2, COST, lambda tokens: 0.0)
    assert [int(each.ranks[0]) for each in moved] == [1, 0, 0, 0]
    assert [each.count for each in moved] == [100, 90, 40, 1]
    # 40 more tokens elsewhere weigh more than all attention.
    moved = whole_requests(feeds, 2, COST, lambda tokens: 1e6 * tokens)
    assert [int(each.ranks[0]) for each in moved] == [1, 0, 0, 0]


def test_simulated_ways_are_in_order() -> None:
    case = balanced_prompts.simulated("any", MIXES["chat and long"], 8, ARGS)
    assert {len(each) for each in case.seconds.values()} == {6}
    assert case.slower == 0
    assert 0.9 < case.of_ideal("tiles") <= 1.0
    assert case.of_ideal("plain") < case.of_ideal("tiles")
    assert min(case.nbytes) >= 0 < max(case.nbytes)
    # What tiles take beyond the ideal adds up.
    ideal = sum(case.ideal) / len(case.ideal)
    assert min(case.lost()) >= 0
    assert ideal + sum(case.lost()) == pytest.approx(case.mean("tiles"))
    assert len(case.planned) == 6


def test_equal_short_prompts_are_not_slower() -> None:
    case = balanced_prompts.simulated("any", Fixed(300), 8, ARGS)
    assert case.slower == 0
    assert case.of_ideal("plain") > 0.9


def test_replayed_outputs_are_the_same(monkeypatch) -> None:
    monkeypatch.setattr(balanced_prompts, "_LAYER", AttentionShape(4, 2, 16, 4))
    monkeypatch.setattr(balanced_prompts, "_CHUNK", 256)
    monkeypatch.setattr(balanced_prompts, "_LONGEST", 4096)
    case = balanced_prompts.replayed("any", MIXES["chat and long"], 2, ARGS)
    assert case.seconds["plain"][0] > 0
    cases = [*balanced_prompts.rows_of([case], 1.0)]
    assert cases[0][:2] == ["any", "2"]
