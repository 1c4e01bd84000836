"""Nodes joined to documents of a plan."""

from __future__ import annotations

import time

import numpy as np
import pytest

from distca.cost.volume import AttentionShape
from distca.plan import Mask, validate_plan
from distca.plan.paths import Paths, path_lengths
from distca.schedule import ScheduleConfig, TilesScheduler, even_capacities
from support.random_trees import random_nodes


def paths_of_nodes(own, parents) -> list[list[int]]:
    """The numbers of the tokens of each node's path, own tokens numbered node by node."""
    first = np.cumsum(own) - own
    found: list[list[int]] = []
    for node, parent in enumerate(parents.tolist()):
        above = [] if parent < 0 else found[parent]
        found.append(above + list(range(first[node], first[node] + own[node])))
    return found


def test_documents_have_the_paths_of_their_nodes() -> None:
    for seed in range(300):
        own, parents = random_nodes(np.random.default_rng(seed))
        paths, expected = Paths.of(own, parents), paths_of_nodes(own, parents)
        np.testing.assert_array_equal(path_lengths(own, parents), [len(each) for each in expected])
        # As a plan has them: a document's tokens are its parent's first ones, and then its own.
        found: list[list[int]] = []
        number = 0
        columns = paths.lengths, paths.parents, paths.prefix
        for length, parent, prefix in zip(*(each.tolist() for each in columns), strict=True):
            above = found[parent][:prefix] if parent >= 0 else []
            assert len(above) == prefix
            found.append(above + list(range(number, number + length - prefix)))
            number += length - prefix
        assert number == own.sum()
        last = [*(paths.first_node[1:] - 1), len(own) - 1]
        assert found == [expected[node] for node in last]


def test_a_chain_is_one_document() -> None:
    own = np.array([5, 3, 4, 2, 7])
    paths = Paths.of(own, np.array([-1, 0, 1, 1, 2]))
    assert paths.lengths.tolist() == [12, 10, 19]
    assert paths.parents.tolist() == [-1, 0, 0]
    assert paths.prefix.tolist() == [0, 8, 12]
    assert paths.first_node.tolist() == [0, 3, 4]


def test_two_way_nodes_are_documents_of_their_own() -> None:
    own, parents = np.array([5, 3, 4, 2]), np.array([-1, 0, 1, 2])
    paths = Paths.of(own, parents, np.array([False, False, True, False]))
    assert paths.lengths.tolist() == [8, 12, 14]
    assert paths.parents.tolist() == [-1, 0, 1]
    assert paths.query_shift is not None
    assert paths.query_shift.tolist() == [0, 4, 0]
    assert Paths.of(own, parents, np.zeros(4, dtype=bool)).query_shift is None


@pytest.mark.parametrize("turns", [1000, 500])
def test_a_thousand_nodes_in_a_row_are_planned_in_a_second(turns: int) -> None:
    """The turns of a conversation; where there are more nodes, each turn has another answer."""
    own = np.random.default_rng(0).integers(100, 400, 1000)
    parents = np.concatenate([np.arange(turns) - 1, np.arange(1000 - turns)])
    paths = Paths.of(own, parents)
    assert len(paths.lengths) == 1001 - turns
    config = ScheduleConfig(0.05, AttentionShape(8, 2, 128))
    began = time.process_time()
    plan = TilesScheduler(config).plan(
        paths.lengths, even_capacities(int(own.sum()), 8), Mask(), paths.parents, paths.prefix
    )
    # 0.05 s on an idle machine; as many documents below each other took 9 s.
    assert time.process_time() - began < 1
    validate_plan(plan)
