"""Windows on all or some layers in the simulator: baselines, DistCA, and what divides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.kernel_time import AnalyticCost
from distca.cost.model_sizes import MODELS
from distca.plan import LayerMasks, Mask
from distca.simulate import (
    CLUSTERS,
    BaselineLayout,
    Candidate,
    ModelCosts,
    Workload,
    divisions,
    simulate,
    simulate_baseline,
)
from distca.simulate.baselines import WITHOUT_WINDOWS
from distca.simulate.layer_mean import LayerMean
from support.simulated import IDEAL, MODEL

ALTERNATING = replace(MODEL, window_left=99, window_attn_skip_freq=2)


def test_presets_have_their_patterns() -> None:
    gemma, gpt = MODELS["gemma3-27b-like"], MODELS["gpt-oss-120b-like"]
    assert gemma.masks == LayerMasks((Mask(), Mask(1023)), (1, 1, 1, 1, 1, 0))
    assert gpt.masks == LayerMasks((Mask(), Mask(127)), (1, 0))
    total = [
        m.layers * m.total_layer_parameters + 2 * m.vocabulary_parameters for m in (gemma, gpt)
    ]
    # Gemma's embedding is its output layer, too; both have norms and routers besides.
    assert (total[0] - gemma.vocabulary_parameters) / 1e9 == pytest.approx(27, rel=0.05)
    assert total[1] / 1e9 == pytest.approx(117, rel=0.02)
    scout = MODELS["llama4-scout-like"]
    assert scout.masks == LayerMasks((Mask(), Mask(None, 8192)), (1, 1, 1, 0))
    parameters = scout.layers * scout.total_layer_parameters + 2 * scout.vocabulary_parameters
    assert parameters / 1e9 == pytest.approx(109, rel=0.02)
    assert MODEL.masks == LayerMasks()
    assert replace(MODEL, window_left=5).masks == LayerMasks((Mask(5),))


def test_a_mean_layer_sees_what_its_layers_see() -> None:
    base = AnalyticCost(1.0, 1.0)
    mean = LayerMean.of(base, replace(ALTERNATING, layers=3))
    # A whole document, a head, and a tail over all keys before it.
    q, kv = np.array([1000, 50, 300]), np.array([1000, 50, 1000])
    pairs = Mask().pairs(kv - q, kv, 0 * kv, kv)
    expected = [
        (pairs[n] + 2 * sum(min(i + 1, 100) for i in range(kv[n] - q[n], kv[n]))) / 3
        for n in range(3)
    ]
    assert mean.seconds(q, kv, pairs).tolist() == pytest.approx(expected)
    assert LayerMean.of(base, MODEL) is base


@pytest.mark.parametrize("system", ["plain", "tiles"])
@pytest.mark.parametrize("local", [{"window_left": 99}, {"attention_chunk_size": 1024}])
def test_one_rank_takes_the_sum_of_its_layers(system: str, local: dict[str, int]) -> None:
    batch = [np.array([6000, 2192])]
    alternating = replace(MODEL, **local, window_attn_skip_freq=2)

    def seconds(**changes: int | None) -> float:
        workload = Workload(replace(alternating, **changes), IDEAL, 1, 8192, 1)
        return simulate(Candidate(system, 1, 1, 1, 1, 1), workload, batch).seconds

    full = seconds(**dict.fromkeys(local))
    window = seconds(window_attn_skip_freq=None)
    assert window < full
    assert seconds() == pytest.approx((full + window) / 2)
    # Every third of four layers has none.
    assert seconds(window_attn_skip_freq=3) == pytest.approx((full + 3 * window) / 4)


def test_what_has_no_windows_and_what_divides() -> None:
    workload = Workload(ALTERNATING, CLUSTERS["dgx-h200"], 8, 8192, 8)
    for system in WITHOUT_WINDOWS:
        assert not divisions(system, workload, (1, 2), (1,))
        costs = ModelCosts(ALTERNATING, IDEAL)
        with pytest.raises(ValueError, match=f"{system.replace('+', '.')} has no sliding windows"):
            simulate_baseline(system, np.array([512] * 4), BaselineLayout(1, 2, 1, 1), costs)
    # Stages of one layer would have different masks.
    found = divisions("tiles", workload, (1,), (1, 2, 4))
    assert {candidate.stages for candidate in found} == {1, 2}


def test_distca_balances_layers_with_and_without_windows() -> None:
    batch = [np.array([8192]), np.array([256] * 32)] * 4
    workload = Workload(ALTERNATING, CLUSTERS["dgx-h200"], 8, 8192, 8, 0.05)
    alone = simulate(Candidate("plain", 1, 1, 8, 1, 1), workload, batch)
    shared = simulate(Candidate("tiles", 1, 1, 8, 1, 1), workload, batch)
    assert shared.seconds < alone.seconds
    assert shared.tokens == alone.tokens == 65_536
