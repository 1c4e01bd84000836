"""Simulated dynamic context parallelism: micro-batches whose groups have sizes of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.simulate import (
    BaselineLayout,
    divisions,
    simulate,
    simulate_baseline,
)
from distca.simulate.baselines import DYNAMIC
from distca.simulate.bins import Bins
from distca.simulate.dynamic import DynamicBins
from distca.simulate.one_f_one_b import Passes, one_f_one_b
from distca.simulate.sharing import ring_bytes
from distca.simulate.workload import Workload
from support.simulated import IDEAL, MODEL, costs_on, passes
from support.simulated_jobs import JOBS, batch


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_documents_run_side_by_side_or_in_turn(size: int) -> None:
    """Each alone on a rank, or several in turn on groups of `size` ranks."""
    costs, lengths = costs_on(IDEAL), np.full(4, 8192)
    found = simulate_baseline(DYNAMIC, lengths, BaselineLayout(1, 4 // size, size, 1), costs)
    alone = sum(passes(costs, 8192, 4, True))
    assert found.seconds == pytest.approx(alone)
    assert found.computed.tolist() == pytest.approx([alone] * 4)
    rows = costs.shape.q_row_bytes, costs.shape.kv_row_bytes, costs.shape.out_row_bytes
    there, back = ring_bytes(8192 // size, size, 1, *rows)
    # Of all documents a rank has a part of as many as its group has ranks.
    assert found.bytes_sent["shared forward"].tolist() == [MODEL.layers * size * there] * 4
    assert found.bytes_sent["shared backward"].tolist() == [MODEL.layers * size * back] * 4


@pytest.mark.parametrize("stages", [1, 2])
def test_groups_of_one_rank_are_plain_megatron(stages: int) -> None:
    """Two micro-batches of four equal documents: the same time, memory and waits."""
    costs, lengths = costs_on(IDEAL), np.full(8, 8192)
    ours = simulate_baseline(DYNAMIC, lengths, BaselineLayout(stages, 4, 1, 1), costs)
    plain = simulate_baseline("plain", lengths, BaselineLayout(stages, 4, 1, 2), costs)
    assert ours.seconds == pytest.approx(plain.seconds)
    assert ours.memory_bytes.tolist() == pytest.approx(plain.memory_bytes.tolist())
    assert ours.computed.tolist() == pytest.approx(plain.computed.tolist())
    assert ours.exposed.tolist() == pytest.approx(plain.exposed.tolist())


def test_documents_of_a_rank_are_packed() -> None:
    """A micro-batch with all of a rank's documents is launched, and kept, as one."""
    costs, lengths = costs_on(replace(IDEAL, launch_seconds=0.01)), np.array([8192, *[1024] * 8])
    packed = DynamicBins.of(
        lengths, BaselineLayout(1, 2, 1, 1), costs, costs.cluster.attention_cost(costs.shape)
    )
    assert packed is not None
    assert packed.bins.tokens[:, :, 0].tolist() == [[8192], [8192]]
    assert packed.bins.shared.calls.tolist() == [[1], [1]]
    whole = costs.state_bytes(0, 1, 2) + 8192 * MODEL.layers * costs.activation_bytes()
    found = simulate_baseline(DYNAMIC, lengths, BaselineLayout(1, 2, 1, 1), costs)
    assert found.memory_bytes.min() > whole


def test_only_ranks_of_a_group_wait_for_each_other() -> None:
    costs, layout = costs_on(IDEAL), BaselineLayout(1, 3, 1, 2)
    seconds = np.array([[1.0, 1.0], [5.0, 1.0], [3.0, 1.0]])
    none = np.zeros(3)
    each = [Passes(seconds, 0 * seconds, none, none)]
    shared = DynamicBins.of(
        np.full(3, 8), BaselineLayout(1, 4, 1, 1), costs, costs.cluster.attention_cost(costs.shape)
    )
    assert shared is not None
    bins = Bins(np.ones((3, 2, 1)), shared.bins.shared)
    (apart,) = one_f_one_b(each, bins, layout, costs)
    assert apart.tolist() == [2.0, 6.0, 4.0]
    (together,) = one_f_one_b(each, bins, layout, costs, np.array([[0, 0], [1, 1], [2, 0]]))
    assert together.tolist() == [4.0, 6.0, 4.0]


def test_replicas_wait_for_those_with_their_experts() -> None:
    job = JOBS["experts"]
    candidate = divisions(DYNAMIC, job, [1], [1])[0]
    alone = replace(job, expert_parallel=1)
    slower, faster = (simulate(candidate, each, batch(0)) for each in (job, alone))
    assert slower.exposed.sum() > faster.exposed.sum()


def test_all_divisions_run() -> None:
    workload = Workload(MODEL, IDEAL, gpus=8, context=8192, sequences=8)
    documents = [np.array([8192]), *[np.full(8, 1024)] * 7]
    found = divisions(DYNAMIC, workload, [1, 2], [1, 2])
    assert {(c.tensor, c.stages, c.data, c.context) for c in found} == {
        *((1, 1, 8 // size, size) for size in (1, 2, 4, 8)),
        *((tp, pp, 4 // size, size) for tp, pp in ((1, 2), (2, 1)) for size in (1, 2, 4)),
        *((2, 2, 2 // size, size) for size in (1, 2)),
    }
    for candidate in found:
        outcome = simulate(candidate, workload, documents)
        assert outcome.tokens == 8 * 8192
        assert outcome.computed.shape == (candidate.stages * candidate.data * candidate.context,)
    # Megatron asks for an even number of ranks.
    assert not divisions(DYNAMIC, replace(workload, gpus=4), [4], [1])


def test_what_does_not_run() -> None:
    costs, lengths = costs_on(IDEAL), np.full(4, 8192)
    assert not simulate_baseline(DYNAMIC, lengths, BaselineLayout(1, 3, 1, 1), costs).fits
    with pytest.raises(ValueError, match="chooses its number of micro-batches itself"):
        simulate_baseline(DYNAMIC, lengths, BaselineLayout(1, 4, 1, 2), costs)
    windows = costs_on(IDEAL, window_left=500)
    with pytest.raises(ValueError, match="dynamic-cp has no sliding windows"):
        simulate_baseline(DYNAMIC, lengths, BaselineLayout(1, 4, 1, 1), windows)
