"""Megatron's dynamic context parallelism as a baseline: its rules, and what they make of batches.

`RECORDED` and the digest are what Megatron-LM's own function said (`next_hdp_group_packing_aware`
of branch dev, commit d48bd6be), run on the same lengths.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, validate_plan
from distca.plan.span import Int64s
from distca.schedule import DynamicContextParallel, ScheduleConfig, even_capacities
from support.batches import documents, placement_rows, task_rows

SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=64)


def dynamic(size: int | None = None) -> DynamicContextParallel:
    return DynamicContextParallel(ScheduleConfig(shape=SHAPE, context_parallel_size=size))


def groups_of(rounds: list[list[list[int]]]) -> list[list[tuple[int, ...]]]:
    """Ranks of each group, and its documents."""
    found = []
    for each in rounds:
        groups: list[tuple[int, ...]] = []
        for own in each:
            if groups and groups[-1][1:] == tuple(own):
                groups[-1] = (groups[-1][0] + 1, *own)
            else:
                groups.append((1, *own))
        found.append(groups)
    return found


RECORDED = [
    ([1000] * 4, 4, 1000, [[(1, 0), (1, 1), (1, 2), (1, 3)]]),
    (
        *([4000, 900, 800, 700, 300, 200, 100], 8, 1000),
        [[(4, 0), (2, 1, 6), (1, 2, 5), (1, 3, 4)]],
    ),
    ([3000, 2900, 500, 400, 100, 100], 4, 1000, [[(4, 0, 2, 3, 4)], [(4, 1, 5)]]),
    (
        *([700, 600, 500, 400, 300, 200, 100, 50], 2, 1000),
        [[(1, 0, 4), (1, 1, 3)], [(1, 2), (1, 5, 6, 7)]],
    ),
    # One document is divided among all ranks.
    ([900, 800, 50], 12, 900, [[(8, 0), (4, 1, 2)]]),
    ([100], 10, 100, [[(10, 0)]]),
    # No group can be doubled.
    ([800, 400], 14, 100, [[(14, 0, 1)]]),
]


@pytest.mark.parametrize(("lengths", "ranks", "most", "expected"), RECORDED)
def test_what_megatron_s_own_function_says(lengths, ranks: int, most: int, expected) -> None:
    assert groups_of(dynamic().rounds(np.array(lengths), ranks, most)) == expected


def test_what_it_says_of_many_batches() -> None:
    digest, micro_batches = hashlib.sha256(), 0
    for seed in range(200):
        drawn = random.Random(seed)
        ranks, number = drawn.choice([2, 4, 6, 8, 12, 16, 24, 32, 64]), drawn.randint(1, 60)
        lengths = [max(1, int(drawn.lognormvariate(6, 1.2))) for _ in range(number)]
        size = drawn.choice([1, 2, 3, 4, 8])
        size = size if size <= ranks // 2 else 1
        rounds = dynamic().rounds(np.array(lengths), ranks, -(-max(lengths) // size))
        micro_batches += len(rounds)
        digest.update(repr(rounds).encode())
    assert (digest.hexdigest()[:16], micro_batches) == ("df29d67ef8f75e86", 330)


@pytest.mark.parametrize(
    ("lengths", "ranks", "message"),
    [
        ([100], 3, "an even number of ranks, not 3"),
        ([5000], 6, "a document of 5,000 tokens needs 16 ranks with at most 512 each"),
        # Where Megatron-LM's function ends with an IndexError.
        ([512, 512], 10, "Megatron-LM's scheduler fails for 10 ranks"),
    ],
)
def test_what_megatron_cannot_do(lengths, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dynamic().rounds(np.array(lengths), ranks, 512)


@settings(max_examples=60)
@given(documents(most_ranks=24), st.sampled_from([None, 1, 3, 8]))
def test_plans_are_valid(batch: tuple[Int64s, Int64s], size: int | None) -> None:
    lengths, capacities = batch
    ranks = len(capacities)
    most = max(int(capacities.min()) if size is None else -(-int(lengths.max()) // size), 1)
    try:
        rounds = dynamic().rounds(lengths, ranks, most)
    except ValueError:
        with pytest.raises(ValueError, match=r"even number|needs \d+ ranks|scheduler fails"):
            dynamic(size).plan(lengths, capacities, Mask())
        return
    found = dynamic(size).plan_rounds(lengths, capacities, Mask())
    plan, at = found.plan, found.plan.placement
    validate_plan(plan)
    for number, each in enumerate(rounds):
        tokens = np.zeros(ranks)
        for rank, own in enumerate(each):
            # No rank is left empty, and none has more than it may.
            assert own
            assert (found.round_of_document[own] == number).all()
            sizes = [sum(document in others for others in each) for document in own]
            tokens[rank] = sum(lengths[d] / n for d, n in zip(own, sizes, strict=True))
            assert each[found.groups[number, rank]] == own
        assert tokens.max() <= most + 1e-6
        mine = at.select(np.isin(at.document, np.flatnonzero(found.round_of_document == number)))
        assert (mine.tokens_per_rank() <= np.ceil(tokens) + len(lengths)).all()
    # No query moves.
    assert plan_bytes(plan, SHAPE).phases["combine"].sum() == 0
    again = dynamic(size).plan(lengths, capacities, Mask())
    assert (task_rows(again), placement_rows(again)) == (task_rows(plan), placement_rows(plan))


def test_ranks_wait_for_those_of_their_group() -> None:
    """Not for all, as those of hybrid context parallelism do after each round."""
    lengths = np.array([700, 600, 500, 400, 300, 200, 100, 50])
    found = dynamic(1).plan_rounds(lengths, even_capacities(int(lengths.sum()), 2), Mask())
    assert found.groups.tolist() == [[0, 1], [0, 1], [0, 0]]
    seconds = np.array([[1.0, 5.0], [4.0, 1.0], [2.0, 2.0]])
    assert found.end(seconds) == 8.0
    found.groups[1] = 0
    assert found.end(seconds) == 11.0
    (note,) = dynamic(1).plan(lengths, even_capacities(int(lengths.sum()), 2), Mask()).notes
    assert note.startswith("3 micro-batches; in each, the ranks of a group wait for each other")
