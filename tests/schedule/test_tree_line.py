"""Trees on a line: every token on one rank, ranks full, neighbours together, few bytes."""

from __future__ import annotations

import numpy as np
import pytest

from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, place_in_turn
from distca.schedule import ScheduleConfig, TilesScheduler, even_capacities
from distca.schedule.base import shared_prefixes
from distca.schedule.tiles.tree_line import TreeLine
from support.random_trees import random_family

SHAPE = AttentionShape(32, 8, 128)


def owners(placement, lengths, prefix) -> list[np.ndarray]:
    """Rank of each own token of each document; -1: nobody's."""
    found = [np.full(end - start, -1) for start, end in zip(prefix, lengths, strict=True)]
    columns = placement.document, placement.start, placement.end, placement.rank
    for document, start, end, rank in zip(*(each.tolist() for each in columns), strict=True):
        part = found[document][start - prefix[document] : end - prefix[document]]
        assert (part == -1).all()
        part[:] = rank
    return found


def test_each_token_is_on_one_rank_and_ranks_are_full() -> None:
    for seed in range(200):
        random = np.random.default_rng(seed)
        lengths, parents, prefix = random_family(random)
        line = TreeLine.of(lengths - prefix, prefix, parents)
        ranks = int(random.integers(1, 5))
        capacities = even_capacities(int(line.own.sum()), ranks)
        speeds, number = random.uniform(0.5, 2.0, ranks), int(random.integers(1, 5))
        tokens = line.of_trees(lengths - prefix).astype(np.int64)
        for placement in (
            line.chunks(capacities, speeds, Mask(), number),
            line.of_nodes(place_in_turn(tokens, capacities)),
        ):
            found = owners(placement, lengths, prefix)
            assert all((each >= 0).all() for each in found)
            np.testing.assert_array_equal(placement.tokens_per_rank(), capacities)
        # In turn, ranks rise along the line.
        assert (np.diff(np.concatenate([found[n] for n in line.order])) >= 0).all()


def test_a_line_is_depth_first() -> None:
    parents = np.array([-1, 0, 0, -1, 1, 2, 1])
    prefix = np.array([0, 5, 5, 0, 7, 8, 7])
    line = TreeLine.of(np.array([5, 2, 3, 4, 1, 1, 6]), prefix, parents)
    assert line.order.tolist() == [0, 1, 4, 6, 2, 5, 3]
    assert line.tree.tolist() == [0] * 6 + [1]
    assert line.of_trees(np.array([5, 2, 3, 4, 1, 1, 6])).tolist() == [18, 4]


def test_light_chunks_are_with_heavy_ones() -> None:
    """Of a prompt and its answers each rank has a part, so that nothing else has to move."""
    parents = np.array([-1, *[0] * 8])
    lengths, prefix = np.array([2048, *[2560] * 8]), np.array([0, *[2048] * 8])
    line = TreeLine.of(lengths - prefix, prefix, parents)
    placement = line.chunks(even_capacities(6144, 4), np.ones(4), Mask(), 6)
    loads = np.zeros(4)
    columns = placement.start, placement.end, np.zeros_like(placement.start), placement.end
    np.add.at(loads, placement.rank, Mask().pairs(*columns))
    assert loads.max() < 1.01 * loads.mean()
    # A rank that is twice as fast gets the heaviest chunks.
    fast = line.chunks(even_capacities(6144, 4), np.array([1.0, 1.0, 1.0, 2.0]), Mask(), 6)
    on_prompt = np.bincount(fast.rank, (fast.document == 0) * (fast.end - fast.start))
    assert on_prompt[3] < on_prompt[:3].min()


@pytest.mark.parametrize("ranks", [8, 64])
def test_bytes_are_near_those_of_the_keys_alone(ranks: int) -> None:
    """Each rank needs the keys of the prompts of its answers: not much more than that moves."""
    random = np.random.default_rng(ranks)
    lengths: list[int] = []
    parents: list[int] = []
    for prompt in random.lognormal(10.9, 0.5, 32).astype(int):
        root = len(lengths)
        lengths += [int(prompt)]
        lengths += [int(prompt) + int(n) for n in random.lognormal(8.9, 0.5, 16)]
        parents += [-1, *[root] * 16]
    family = np.array(lengths), np.array(parents)
    prefix = shared_prefixes(*family)
    own = family[0] - prefix
    capacities = even_capacities(int(own.sum()), ranks)
    plan = TilesScheduler(ScheduleConfig(0.05, SHAPE)).plan(
        family[0], capacities, Mask(), family[1]
    )
    assert plan.loads().max() <= 1.051 * plan.loads().mean()
    received = plan_bytes(plan, SHAPE).messages["dispatch"].received()
    # As many keys as a rank owns tokens, three times. Nodes packed one by one: 26 times.
    assert received.max() < 3 * capacities[0] * SHAPE.kv_row_bytes
