"""Bytes between servers, which pages of `distca simulate` show: those of the exchanges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.cost.volume import Messages
from distca.schedule import ExecutionOptions
from distca.simulate import CLUSTERS, PUBLISHED, simulate_ticks
from distca.simulate.resources import Resources, Transfer
from support.simulated import costs_on, planned

CLUSTER = replace(CLUSTERS["dgx-h200"], gpus_per_node=2, charges=PUBLISHED)


def test_each_message_is_counted_between_its_ranks() -> None:
    """Messages inside of nodes and between them, with empty ones, in any order."""
    rng = np.random.default_rng(1)
    pairs = rng.permutation([pair for pair in range(64) if pair // 8 != pair % 8])[:40]
    sizes = rng.integers(0, 10**9, 40) * (rng.random(40) < 0.8)
    messages = Messages(pairs // 8, pairs % 8, sizes, 8)
    resources = Resources(8, CLUSTER, np.ones(8), recording=True)
    moved = Transfer.of_messages(messages, CLUSTER.links(1))
    for _ in range(2):
        resources.exchange(moved, "dispatch")
    expected = np.zeros((8, 8), dtype=np.int64)
    np.add.at(expected, (pairs // 8, pairs % 8), 2 * sizes)
    assert resources.between is not None
    assert (resources.between == expected).all()


def test_an_iterations_bytes_are_those_sent() -> None:
    plan = planned([[4096, 2048, 2048]] * 3, 2, 2, ExecutionOptions("tiles"))
    outcome = simulate_ticks(plan, costs_on(CLUSTER), recording=True)
    between = outcome.bytes_between
    assert between is not None
    assert (between.sum(axis=1) == sum(outcome.bytes_sent.values())).all()
    assert between.sum() > 0
    assert not between.diagonal().any()
    assert simulate_ticks(plan, costs_on(CLUSTER)).bytes_between is None
