"""The benchmark of more ranks: all ways compute the same, and its tables say what was measured."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.training.more_ranks import (
    Case,
    Rates,
    Way,
    build_parser,
    end_of_parts,
    grouped,
    over_best_peer,
    parts_of,
    peers_of,
    settings_of,
    step_seconds,
    table,
    ways_of,
)
from benchmarks.training.setting import document_lengths
from benchmarks.virtual_ranks import Part, Replayed, Rows, replay
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, validate_plan
from distca.schedule import DynamicContextParallel, ScheduleConfig

SHAPE = AttentionShape(2, 1, 8, 4)
RATES = Rates(1e-5, 1e-8)


def arguments(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args([*flags, "--output", "nowhere"])


def parts(way: Way, lengths: np.ndarray, ranks: int) -> list[Part]:
    return parts_of(way, lengths, ranks, 2, SHAPE, RATES)


def test_all_ways_compute_the_same() -> None:
    """Groups, rounds and nano-batches; documents of several ranks, and one that ping and pong
    share."""
    lengths = np.array([900, 300, 31, 1, 180, 636])
    ranks = 4
    rows = Rows.random(int(lengths.sum()), SHAPE)
    found = {}
    for way in ways_of(ranks, 2, [0.1]):
        planned = parts(way, lengths, ranks)
        for part in planned:
            validate_plan(part.plan)
        found[way] = replay(planned, SHAPE, rows)
        sent = sum(plan_bytes(part.plan, SHAPE).sent() for part in planned)
        assert found[way].bytes_sent.tolist() == sent.tolist()
        assert found[way].seconds.shape == (len(planned), ranks)
        assert (found[way].seconds > 0).all()
    ping_pong = next(way for way in found if way.ping_pong)
    assert any(part.plan.cached_prefix is not None for part in parts(ping_pong, lengths, ranks))
    hybrid = [way for way in found if way.scheduler == "hybrid-cp"]
    assert len(parts(hybrid[0], lengths, ranks)) > 1
    totals = [each.total for each in found.values()]
    assert totals == pytest.approx([totals[0]] * len(totals), rel=1e-4)
    # Gradients of keys that were sent elsewhere would be missed.
    other = replay(parts(ping_pong, lengths[::-1].copy(), ranks), SHAPE, rows)
    assert other.total != pytest.approx(totals[0], rel=1e-4)


def test_ranks_wait_after_each_part() -> None:
    """Two parts on two ranks: the first has 256 tokens on either, the second 128 on one alone."""
    both = parts(Way("packed"), np.array([256, 256]), 2)
    alone = parts(Way("wlb-llm", 1), np.array([128]), 2)
    seconds = np.array([[3.0, 4.0], [2.0, 1.0]])
    found = Replayed(seconds, np.zeros(2, dtype=np.int64), 0.0)
    tokens = [part.plan.own_tokens_per_rank().tolist() for part in [*both, *alone]]
    assert tokens == [[256, 256], [128, 0]]
    # A second a token, two layers.
    assert step_seconds([*both, *alone], found, 2, Rates(1.0, 1.0)) == 256 + 8 + 128 + 4


def test_ranks_of_dynamic_cp_wait_for_their_group_alone() -> None:
    """Micro-batches in which two groups of one rank, then one of both, then two run."""
    lengths = np.array([256, 256])
    groups = np.array([[0, 1], [0, 0], [0, 1]])
    planned = [replace(parts(Way("packed"), lengths, 2)[0], groups=each) for each in groups]
    seconds = np.array([[3.0, 4.0], [2.0, 1.0], [1.0, 5.0]])
    # Both begin the second when the slower one has run the first.
    assert end_of_parts(planned, seconds) == 4 + 1 + 5
    found = Replayed(seconds, np.zeros(2, dtype=np.int64), 0.0)
    assert step_seconds(planned, found, 1, Rates(1.0, 1.0)) == 4 + 1 + 5 + 3 * 256
    with_all = [replace(part, groups=None) for part in planned]
    assert end_of_parts(with_all, seconds) == 4 + 2 + 5


def test_parts_of_dynamic_cp_have_its_groups() -> None:
    lengths = np.array([900, 300, 31, 1, 180, 636])
    config = ScheduleConfig(shape=SHAPE, context_parallel_size=2)
    expected = DynamicContextParallel(config).plan_rounds(lengths, np.full(4, 512), Mask())
    found = parts(Way("dynamic-cp", 2), lengths, 4)
    assert [each.groups.tolist() for each in found] == expected.groups.tolist()
    for part, of_ranks in zip(found, expected.groups, strict=True):
        owners = part.plan.placement
        assert len(part.plan.lengths)
        for document in range(len(part.plan.lengths)):
            assert len(set(of_ranks[owners.rank[owners.document == document]])) == 1
    assert all(each.groups is None for each in parts(Way("hybrid-cp", 2), lengths, 4))


@pytest.mark.parametrize(
    ("ranks", "longest", "expected"),
    [
        (
            8,
            1,
            [
                *("plain Megatron", "per-document CP of 4", "per-document CP of 8"),
                *("hybrid CP of 1", "hybrid CP of 4", "dynamic CP of 1", "dynamic CP of 4"),
                *("WLB-LLM of 1", "WLB-LLM of 4", "WLB-LLM of 8"),
                *("DistCA, whole, tolerance 0.1", "DistCA, ping-pong, tolerance 0.1"),
            ],
        ),
        (
            4,
            4,
            [
                *("per-document CP of 4", "WLB-LLM of 4"),
                *("DistCA, whole, tolerance 0.1", "DistCA, ping-pong, tolerance 0.1"),
            ],
        ),
    ],
)
def test_ways(ranks: int, longest: int, expected: list[str]) -> None:
    assert [str(way) for way in ways_of(ranks, longest, [0.1])] == expected


def cases() -> list[Case]:
    """Two seeds of one mix; the attention and bytes are of no account."""
    steps = {
        "plain Megatron": (4.0, 6.0),
        "hybrid CP of 4": (2.0, 3.0),
        "WLB-LLM of 1": (2.5, 2.0),
        "DistCA, whole, tolerance 0.1": (2.0, 2.0),
    }
    return [
        Case(8, 1, "pretrain", seed, way, 0.5, 1.25, each[seed], 10.0 + seed, 40.0)
        for seed in (0, 1)
        for way, each in steps.items()
    ]


def test_tables() -> None:
    """Speeds are over the fastest peer of each batch, and bytes those of the fastest mean step."""
    groups = grouped(cases())
    assert {*peers_of(groups["pretrain"])} == {"hybrid CP of 4", "WLB-LLM of 1"}
    row = "| pretrain | WLB-LLM of 1 | 10.50 | 1.000 (1.000 to 1.000) | 10.50 |"
    assert over_best_peer(cases()).splitlines()[-1] == row
    dynamic = [
        Case(8, 1, "pretrain", seed, f"dynamic CP of {size}", 0.5, 1.25, step, 10.0, 40.0)
        for size, steps in ((1, (1.0, 4.0)), (4, (2.0, 4.0)))
        for seed, step in enumerate(steps)
    ]
    with_dynamic = over_best_peer(cases() + dynamic).splitlines()
    assert with_dynamic[-1] == row.replace("10.50 | 1", "10.50 | 1.250 (0.500 to 2.000) | 1", 1)
    assert "| dynamic CP, each batch's fastest: speed over each batch's fa" in with_dynamic[0]
    head, _, *rows = table(cases()).splitlines()
    assert "speed over plain Megatron" in head
    assert rows[1] == (
        "| pretrain | hybrid CP of 4 | 0.500 (0.500 to 0.500) | 1.25 (1.25 to 1.25) | 2.500 | "
        "2.000 (2.000 to 2.000) | 10.50 (10.00 to 11.00) | 40.0 |"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ranks", "6"), "--ranks-of-longest 4 does not divide --ranks 6: give a divisor"),
        (("--seq-length", "128"), "--seq-length 128: give a multiple of 256"),
    ],
)
def test_flags_that_do_not_go_together(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(arguments(*flags))


def test_documents_are_cut_after_so_many_ranks() -> None:
    setting, _ = settings_of(arguments("--ranks", "8", "--seq-length", "512", "--seeds", "1"))[0]
    short, long = (np.array(document_lengths(setting, "long-tail", n)) for n in (1, 4))
    assert short.sum() == long.sum() == 8 * 512
    assert short.max() <= 512 < long.max() <= 4 * 512
    # Every fourth rank ends where a document ends.
    assert {2048, 4096} <= set(np.cumsum(long).tolist())
    assert set(range(512, 4097, 512)) <= set(np.cumsum(short).tolist())
