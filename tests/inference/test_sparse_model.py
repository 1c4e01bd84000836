"""A model that drops far keys in one process, and what a calibration of it is good for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.cost.link import Links
from distca.inference.models import ServedModel, read_model
from distca.inference.sparse_model import SparseModel
from distca.inference.sparsity_calibration import (
    COMPARED,
    NEEDLE,
    Calibrated,
    calibrate,
    measured_on,
    read_prompts,
    with_needle,
)
from distca.plan import Mask
from distca.plan.span import Floats
from distca.schedule.serving import nobody_holds
from distca.schedule.serving.batches import LayerPlans
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.calibration_file import CalibrationFile
from distca.schedule.serving.csps.configure import Configurator, Partitions
from distca.schedule.serving.csps.pipeline import NearToFar
from support.small_models import VOCABULARY, save_small_model
from support.sparse_reference import sparse_logits

LEVELS = Levels(Links(2), 4)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("model")
    return read_model(str(save_small_model("llama", folder, num_hidden_layers=4)), torch.float32)


def prompts(seed: int, number: int, tokens: int = 340) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, tokens).tolist() for _ in range(number)]


class Kept:
    """A latency that is the share of kept keys."""

    def layer_seconds(self, kept: Floats, partitions: Partitions) -> Floats:
        means: Floats = kept.mean(axis=(1, 2))
        return means

    @property
    def other_seconds(self) -> float:
        return 0.0


def test_nothing_dropped_is_transformers_own(model: ServedModel) -> None:
    (ids,) = prompts(0, 1)
    sparse = SparseModel(model, LEVELS, CPU)
    with torch.no_grad():
        expected = model.load(CPU, "eager")(torch.tensor([ids])).logits[0, -20:]
    dense, mass = sparse.run(ids, None, 20)
    assert torch.allclose(dense, expected, rtol=0, atol=1e-5)
    assert mass.shape[:3] == (4, 2, 2)
    # Half of the keys have about half of what all have: of random weights none is important.
    shares = mass[2, :, :, 9] / mass[2, :, :, 0]
    assert ((shares > 0) & (shares < 0.6)).all()
    again, none = sparse.run(ids, Sparsity.nothing_dropped(4, 2), 20)
    assert torch.equal(again, dense)
    assert not none.size
    dropped, _ = sparse.run(ids, Sparsity.of_drop_ratio(0.5, 4, 2), 20)
    assert (dropped - dense).abs().max() > 1e-3


@pytest.mark.parametrize(("partitions", "of_queries"), [(1, 0.0), (2, 0.4)])
def test_what_is_dropped_is_what_plans_drop(
    model: ServedModel, partitions: int, of_queries: float
) -> None:
    """Its logits are those of the definition, which the ranks are held against, too."""
    (ids,) = prompts(5, 1, 90)
    sparsity = Sparsity.of_drop_ratio(0.6, 4, 2, drop_of_queries=of_queries)
    strategy = NearToFar(LEVELS, sparsity, (None,) * 4, (partitions,))
    new = strategy.shard(np.array([0]), np.array([len(ids)]))
    dense = strategy.plan(nobody_holds(LEVELS.ranks), new, Mask())
    plans = LayerPlans({Mask(): dense}, strategy.sparse_plans(dense))
    expected = sparse_logits(model, plans, ids, LEVELS.ranks)
    found, _ = SparseModel(model, LEVELS, CPU, partitions).run(ids, sparsity, 1)
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-5)


def test_windows_are_refused(tmp_path: Path) -> None:
    windows = read_model(str(save_small_model("mistral", tmp_path)), torch.float32)
    with pytest.raises(ValueError, match="has layers with windows, which see only near keys"):
        SparseModel(windows, LEVELS, CPU)


def test_what_is_compared_is_at_most_a_quarter_of_a_prompt(
    model: ServedModel, tmp_path: Path
) -> None:
    file, least = tmp_path / "prompts.json", 4 * (COMPARED + 2 * NEEDLE)
    file.write_text(json.dumps(prompts(4, 8, least)))
    assert [len(each) for each in read_prompts(file, model)] == [least] * 8
    file.write_text(json.dumps([*prompts(4, 8, least), *prompts(5, 1, least - 1)]))
    with pytest.raises(ValueError, match=f"prompt 8 has {least - 1} tokens: give at least {least}"):
        read_prompts(file, model)


def test_needles_are_hidden_and_asked_for() -> None:
    (ids,) = prompts(1, 1)
    found = [with_needle(ids, seed) for seed in range(20)]
    for each in found:
        needle = each[-NEEDLE:]
        assert len(each) == len(ids)
        assert len({*needle}) == NEEDLE
        at = [n for n in range(len(each) - NEEDLE) if each[n : n + NEEDLE] == needle]
        assert len(at) == 1
        assert each[: at[0]] == ids[: at[0]]
        assert at[0] <= 0.75 * len(ids)
    assert len({tuple(each[-NEEDLE:]) for each in found}) == 20


def test_prompts_that_were_not_measured_stay_within_the_bound(model: ServedModel) -> None:
    seen, unseen = prompts(2, 8), prompts(3, 6)
    file = CalibrationFile(measured_on(model, LEVELS, seen, 0), [], [])
    for each in calibrate(file, model, LEVELS, seen, 12, 0):
        file = each
    configurator = Configurator(file.calibration, Kept(), 340)
    measured = [float(np.mean(each.degraded["kl"])) for each in file.calibration.measured]
    bounds = np.array([0.1, 0.4, 1.0]) * np.mean(measured)
    chosen = [configurator.fastest(float(bound)) for bound in bounds]
    kept = [each.seconds for each in chosen]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 1.05 * kept[-1]
    calibrated = Calibrated(SparseModel(model, LEVELS, CPU), unseen, seed=50)
    samples = [each.sparsity for each in chosen]
    found = [calibrated.measure(number, samples) for number in range(len(unseen))]
    realised = np.mean([each.degraded["kl"] for each in found], axis=0)
    assert (realised <= bounds).all()
    # Nor is the bound far above.
    assert (realised > 0.05 * bounds).all()
