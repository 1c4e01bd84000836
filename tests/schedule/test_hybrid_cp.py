"""Megatron's hybrid context parallelism as a baseline: its own scheduler's output, as plans."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, validate_plan
from distca.plan.span import Int64s
from distca.schedule import HybridContextParallel, ScheduleConfig, even_capacities
from distca.schedule.baselines.hybrid_cp import balanced_scheduler, find_balanced_scheduler
from distca.wording import install
from support.batches import documents, long_tailed_lengths, placement_rows, task_rows
from support.commands import Command

SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=64)


def hybrid(size: int | None = None) -> HybridContextParallel:
    return HybridContextParallel(ScheduleConfig(shape=SHAPE, context_parallel_size=size))


class Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def megatrons(lengths: Int64s, ranks: int, most: int) -> dict[int, tuple[int, list[int]]]:
    """What megatron-core itself says: the round and the ranks of each document."""
    scheduler = balanced_scheduler()(most, Group(ranks))
    _, rounds = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    return {
        document: (number, [rank for rank, own in enumerate(each) if document in own])
        for number, each in enumerate(rounds)
        for own in each
        for document in own
    }


@settings(max_examples=60)
@given(documents(most_ranks=24), st.sampled_from([None, 1, 3, 8]))
def test_plans_are_megatrons_own(batch: tuple[Int64s, Int64s], size: int | None) -> None:
    lengths, capacities = batch
    ranks, longest = len(capacities), int(lengths.max())
    most = max(int(capacities.min()) if size is None else -(-longest // size), 1)
    needed = 1 << (-(-longest // most) - 1).bit_length()
    if ranks % 2 or needed > ranks:
        with pytest.raises(ValueError, match=r"an even number of ranks|needs \d+ ranks"):
            hybrid(size).plan(lengths, capacities, Mask())
        return
    try:
        told = megatrons(lengths, ranks, most)
    except (AssertionError, IndexError):
        with pytest.raises(ValueError, match="megatron-core's scheduler fails"):
            hybrid(size).plan(lengths, capacities, Mask())
        return
    found = hybrid(size).plan_rounds(lengths, capacities, Mask())
    plan, at = found.plan, found.plan.placement
    # Every pair of query and key once.
    validate_plan(plan)
    for document, (number, members) in told.items():
        mine = at.select(at.document == document)
        owned = mine.tokens_per_rank()
        # A document may have fewer tokens than ranks.
        assert {*np.flatnonzero(owned)} <= {*members}
        assert owned.max() == -(-int(lengths[document]) // len(members)) <= most
        assert found.round_of_document[document] == number
    # No query moves.
    assert plan_bytes(plan, SHAPE).phases["combine"].sum() == 0
    assert np.array_equal(found.by_round(plan.tasks.pairs(Mask())).sum(axis=0), plan.loads())
    again = hybrid(size).plan(lengths, capacities, Mask())
    assert (task_rows(again), placement_rows(again)) == (task_rows(plan), placement_rows(plan))


def test_what_megatron_says_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another answer of its scheduler is another plan: samples in the order of their subgroups."""
    rounds = [[[2, 0], [2, 0], [3], [3]], [[], [], [1], []]]
    monkeypatch.setattr(
        balanced_scheduler(), "get_groups_and_subsamples", lambda *_: (None, rounds)
    )
    lengths = np.array([400, 300, 200, 100])
    found = hybrid().plan_rounds(lengths, even_capacities(1000, 4), Mask())
    assert found.round_of_document.tolist() == [0, 1, 0, 0]
    at = found.plan.placement
    of_ranks = [dict.fromkeys(at.of_rank(rank).document.tolist()) for rank in range(4)]
    assert [list(own) for own in of_ranks] == [[2, 0], [2, 0], [3, 1], [3]]
    assert at.tokens_per_rank().tolist() == [300, 300, 350, 50]


def test_rounds_and_what_they_cost_are_told() -> None:
    """Of a sample a rank has no more than the limit, of all its samples more than its share."""
    lengths = long_tailed_lengths(4, 16 * 4096, 500, 9000)
    capacities = even_capacities(16 * 4096, 16)
    found = hybrid(8).plan_rounds(lengths, capacities, Mask())
    at = found.plan.placement
    of_sample = np.zeros((len(lengths), 16), dtype=np.int64)
    np.add.at(of_sample, (at.document, at.rank), at.end - at.start)
    assert of_sample.max() <= -(-int(lengths.max()) // 8)
    assert at.tokens_per_rank().max() > capacities.max()
    pairs = found.by_round(found.plan.tasks.pairs(Mask()))
    waiting = pairs.max(axis=1).sum() / pairs.sum(axis=0).mean()
    assert found.rounds > 1
    assert waiting > 1.02 * found.plan.loads().max() / found.plan.loads().mean()
    (note,) = hybrid(8).plan(lengths, capacities, Mask()).notes
    assert note.startswith(f"{found.rounds} rounds, ")
    assert f"{waiting:.3f} times" in note


def test_without_megatron_the_others_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "megatron.core.pipeline_parallel.hybrid_cp_schedule"
    monkeypatch.setitem(sys.modules, name, None)
    flags = "--distribution pretrain --servers 4 --tokens-per-server 4096 --model llama-8b".split()
    command = Command("plan", capsys)
    assert install("megatron") in command.refused(*flags, "--scheduler", "hybrid-cp")
    rows = json.loads(command.run(*flags, "--compare", "--json"))
    assert [name for name, row in rows.items() if "error" in row] == ["hybrid-cp"]


def test_the_scheduler_is_found_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    balanced_scheduler()
    find_balanced_scheduler()
    find_spec = importlib.util.find_spec
    for lacking, message in (("megatron", "hybrid_cp_schedule.py"), ("torch", "there is no torch")):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, lacking=lacking: None if name == lacking else find_spec(name),
        )
        with pytest.raises(ImportError, match=f"{re.escape(install('megatron'))}.*{message}"):
            find_balanced_scheduler()
