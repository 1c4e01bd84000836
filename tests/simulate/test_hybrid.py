"""Simulated hybrid context parallelism: rounds of documents, by megatron-core's own scheduler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.simulate import BaselineLayout, Charges, divisions, simulate, simulate_baseline
from distca.simulate.sharing import ring_bytes
from distca.simulate.workload import Workload
from support.simulated import IDEAL, MODEL, costs_on, passes

pytest.importorskip("megatron.core")


def test_documents_run_one_after_the_other() -> None:
    """Four equal documents: each alone on a rank, or all in turn on four ranks."""
    costs, lengths = costs_on(IDEAL), np.full(4, 8192)
    apart, shared = (
        simulate_baseline("hybrid-cp", lengths, BaselineLayout(1, 4 // size, size, 1), costs)
        for size in (1, 4)
    )
    alone = sum(passes(costs, 8192, 4, True))
    assert apart.seconds == pytest.approx(alone)
    assert apart.computed.tolist() == pytest.approx([alone] * 4)
    assert not any(sent.any() for sent in apart.bytes_sent.values())
    # A quarter of each, with somewhat more tiles on the diagonal.
    assert shared.seconds == pytest.approx(alone, rel=0.05)
    shape = costs.shape
    rows = shape.q_row_bytes, shape.kv_row_bytes, shape.out_row_bytes
    there, back = ring_bytes(2048, 4, 1, *rows)
    assert shared.bytes_sent["shared forward"].tolist() == [4 * 4 * there] * 4
    assert shared.bytes_sent["shared backward"].tolist() == [4 * 4 * back] * 4
    state = costs.state_bytes(0, 1, 4)
    kept = (apart.memory_bytes - state)[0] / (shared.memory_bytes - state)[0]
    assert kept == pytest.approx(4, rel=0.05)
    again = replace(costs, recompute="full")
    longer = simulate_baseline("hybrid-cp", lengths, BaselineLayout(1, 4, 1, 1), again)
    assert longer.seconds - apart.seconds == pytest.approx(passes(costs, 8192, 4, False)[0])


def test_ranks_wait_for_a_long_document_and_all_charges_count() -> None:
    lengths = np.array([32_768, *[1024] * 8])
    costs = costs_on(IDEAL)
    layout = BaselineLayout(1, 4, 1, 1)
    outcome = simulate_baseline("hybrid-cp", lengths, layout, costs)
    assert outcome.seconds == pytest.approx(sum(passes(costs, 32_768, 4, True)))
    assert outcome.idle > 0.5
    assert (outcome.computed + outcome.exposed).tolist() == pytest.approx([outcome.seconds] * 4)
    charged = costs_on(replace(IDEAL, charges=Charges(half_waves=True)))
    more = simulate_baseline("hybrid-cp", lengths, layout, charged)
    assert more.seconds > outcome.seconds
    # Megatron makes no plan for an odd number of ranks.
    none = simulate_baseline("hybrid-cp", lengths, BaselineLayout(1, 3, 1, 1), costs)
    assert not none.fits
    for wrong in (BaselineLayout(2, 2, 1, 2), BaselineLayout(1, 2, 1, 2)):
        with pytest.raises(ValueError, match="hybrid-cp has no pipeline, no micro-batches"):
            simulate_baseline("hybrid-cp", lengths, wrong, costs)


def test_all_divisions_run() -> None:
    workload = Workload(MODEL, IDEAL, gpus=8, context=8192, sequences=4)
    batch = [np.array([8192]), *[np.full(8, 1024)] * 3]
    found = divisions("hybrid-cp", workload, [1, 2], [1, 2])
    assert {(c.tensor, c.stages, c.data, c.context) for c in found} == {
        *((1, 1, 8 // size, size) for size in (1, 2, 4, 8)),
        *((2, 1, 4 // size, size) for size in (1, 2, 4)),
    }
    for candidate in found:
        assert simulate(candidate, workload, batch).tokens == 4 * 8192
