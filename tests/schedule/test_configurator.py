"""Choices of kept ratios, held against trying all; and the regression that they go by."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from distca.cost.link import Links
from distca.plan.span import Floats
from distca.schedule.serving.csps import Levels, Sparsity, configure
from distca.schedule.serving.csps.calibration_file import (
    CalibrationFile,
    MeasuredOn,
    load_calibration,
)
from distca.schedule.serving.csps.configure import Configurator, Partitions, layer_options
from distca.schedule.serving.csps.degradation import (
    GRID,
    Calibration,
    Measured,
    nonnegative_least_squares,
)

LAYERS, HEADS, FAR = 5, 2, 2


def calibration(seed: int, noise: float = 0.0, prompts: int = 8) -> Calibration:
    """A calibration of prompts whose divergence is made of the dropped masses."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(30):
        kept = np.ones((LAYERS, HEADS, FAR + 1))
        kept[1:-1, :, 1:] = rng.uniform(0.02, 1, (LAYERS - 2, 1, 1)) ** np.arange(1, FAR + 1)
        keys = tuple(tuple(map(tuple, heads)) for heads in kept.tolist())
        samples.append(Sparsity(keys, Sparsity.nothing_dropped(*kept.shape).queries))
    exponent = rng.uniform(1, 6, (LAYERS, HEADS, FAR, 1))
    share = rng.uniform(0.02, 0.3, (LAYERS, HEADS, FAR, 1))
    weights = rng.uniform(0.05, 1, (LAYERS, 2))
    measured = []
    for number in range(prompts):
        mass = share * (1 - np.array(GRID)) ** exponent * rng.uniform(0.9, 1.1)
        given = np.array([_masses(mass, each) for each in samples])
        exact = given @ weights[:, 0] + given**2 @ weights[:, 1]
        kl = exact * np.exp(noise * rng.standard_normal(len(samples)))
        degraded = {"kl": kl, "recall_loss": kl / 3}
        measured.append(Measured(300 + 90 * number, mass, degraded, 0.9))  # type: ignore[arg-type]
    return Calibration(samples, measured)


def _masses(mass: Floats, sparsity: Sparsity) -> Floats:
    kept = np.array(sparsity.keys)[:, :, 1:]
    found = np.zeros(LAYERS)
    for layer, head, level in itertools.product(range(1, LAYERS - 1), range(HEADS), range(FAR)):
        found[layer] += np.interp(kept[layer, head, level], GRID, mass[layer, head, level]) / HEADS
    return found


@dataclass(frozen=True)
class Seconds:
    """A latency in which communication of the kept rows hides behind what is computed."""

    bandwidth: float

    def layer_seconds(self, kept: Floats, partitions: Partitions) -> Floats:
        sent = (kept.mean(axis=1) / (self.bandwidth, self.bandwidth / 4)).sum(axis=1)
        computed = 0.5 + kept.mean(axis=(1, 2))
        hidden = np.maximum(sent, computed) + np.minimum(sent, computed) / partitions[0]
        result: Floats = hidden + 0.03 * partitions[0]
        return result

    @cached_property
    def other_seconds(self) -> float:
        return 1.0


@pytest.mark.parametrize("seed", range(4))
def test_choices_are_as_good_as_trying_all(seed: int) -> None:
    """Within 5% of all combinations of a few options, and within the bounds."""
    found = calibration(seed, 0.1)
    rng = np.random.default_rng(seed)
    latency, tokens, partitions = Seconds(float(rng.uniform(0.5, 4))), 500, ((1,), (2,), (4,))
    options = []
    for layer in range(LAYERS):
        every = layer_options(found, tokens, layer)
        few = rng.choice(len(every), min(10, len(every)), replace=False)
        options.append(every[np.unique([0, *few])])
    configurator = Configurator(found, latency, tokens, partitions, options)
    degraded, taken = [], {}
    for layer, each in enumerate(options):
        inner = 0 < layer < LAYERS - 1
        degraded.append(
            found.layer_degradation("kl", tokens, layer, each) if inner else np.zeros(1)
        )
    for number in partitions:
        taken[number] = [latency.layer_seconds(each, number) for each in options]
    every = list(itertools.product(*(range(len(each)) for each in options)))
    kl = np.array([sum(d[n] for d, n in zip(degraded, each, strict=True)) for each in every])
    kl[kl > 0] += found.fits["kl"].margin
    seconds = {
        number: 1 + np.array([sum(t[n] for t, n in zip(of, each, strict=True)) for each in every])
        for number, of in taken.items()
    }
    for bound in (0.0, *np.quantile(kl, [0.1, 0.5, 0.9])):
        best = min(of[kl <= bound].min() for of in seconds.values())
        choice = configurator.fastest(bound)
        assert choice.kl <= bound * (1 + 1e-9)
        assert choice.seconds == pytest.approx(best, rel=0.05)
        assert choice.seconds >= best - 1e-9
        if not bound:
            assert not choice.sparsity.drops
    fastest = min(of.min() for of in seconds.values())
    for bound in np.linspace(fastest * 1.001, seconds[1,][kl == 0].min() * 1.01, 4):
        best = min(kl[of <= bound].min(initial=np.inf) for of in seconds.values())
        choice = configurator.least_degraded(float(bound))
        assert choice.seconds <= bound * (1 + 1e-9)
        assert choice.kl <= best * 1.05 + 1e-9
    with pytest.raises(ValueError, match=f"the best possible is {fastest:.4g} s"):
        configurator.least_degraded(fastest * 0.99)


def test_both_bounds_hold() -> None:
    found = calibration(7)
    configurator = Configurator(found, Seconds(1.0), 500)
    loose = configurator.fastest(0.1, 1.0)
    tight = configurator.fastest(0.1, loose.recall_loss / 2)
    assert tight.recall_loss <= loose.recall_loss / 2
    assert tight.seconds > loose.seconds
    assert loose.sparsity.keys[0] == loose.sparsity.keys[-1] == ((1.0,) * (FAR + 1),) * HEADS
    for wrong in ((-0.1, 1.0), (0.1, -1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="give 0 or more"):
            configurator.fastest(*wrong)


def test_the_regression_is_monotone_and_says_how_far_off_it_is() -> None:
    exact, noisy = calibration(3), calibration(3, 0.3)
    # Each prompt is fitted or held out, one of four the latter.
    kinds = [each.tokens for each in (*exact.fitted, *exact.held_out)]
    assert sorted(kinds) == [each.tokens for each in exact.measured]
    assert len(exact.held_out) == len(exact.measured) // 4
    assert exact.fits["kl"].error < 0.15
    assert noisy.fits["kl"].headroom > exact.fits["kl"].headroom >= 1
    ratios = np.linspace(0.02, 1, 50)
    kept = np.broadcast_to(ratios[:, None, None], (50, HEADS, FAR))
    for layer in range(1, LAYERS - 1):
        degraded = noisy.layer_degradation("kl", 10**6, layer, kept)
        assert (np.diff(degraded) <= 1e-15).all()
        assert degraded[-1] == 0 < degraded[0]
    with pytest.raises(ValueError, match="3 prompts were measured: give at least 4"):
        calibration(3, prompts=3)


def test_measured_ratios_rise_from_nothing_to_all() -> None:
    assert (GRID[0], GRID[-1]) == (0.0, 1.0)
    assert (np.diff(GRID) > 0).all()


def test_masses_between_two_lengths_are_interpolated() -> None:
    """Those of shorter and of longer prompts than were measured are of the nearest."""
    given = calibration(3)
    first, second, *_, last = given.lengths.tolist()
    kept = np.full((HEADS, FAR), 0.3)

    def mass(tokens: float) -> Floats:
        return given.mass(round(tokens), 2, kept)

    assert (mass(first) != mass(second)).all()
    for low, high in itertools.pairwise(given.lengths.tolist()):
        quarter = low + (high - low) // 4
        part = (quarter - low) / (high - low)
        assert mass(quarter) == pytest.approx(mass(low) * (1 - part) + mass(high) * part)
    assert mass(1) == pytest.approx(mass(first))
    assert mass(9 * last) == pytest.approx(mass(last))


def test_weights_are_drawn_between_the_fit_and_what_is_expected() -> None:
    columns, values = np.array([[1.0], [2.0]]), np.array([3.0, 6.0])
    for drawn, weight in ((0.0, 3.0), (1.0, 2.0), (3.0, 1.5)):
        found = nonnegative_least_squares(columns, values, np.array([1.0]), drawn)
        assert found == pytest.approx([weight])
    assert nonnegative_least_squares(-columns, values, np.array([1.0]), 0.0).tolist() == [0.0]


def test_ratios_follow_the_paper_put_right() -> None:
    """Beyond level 1 half as much is kept, or as much; and by mass, in each head its own."""
    options = layer_options(calibration(1), 500, 2)
    assert (options[0] == 1).all()
    of_halves = [each for each in options if np.allclose(each, [[0.8, 0.4]] * HEADS)]
    alike = [each for each in options if np.allclose(each, 0.8)]
    assert len(of_halves) == len(alike) == 1
    assert any((each[0] != each[1]).any() for each in options)
    assert len(layer_options(calibration(1), 500, 0)) == 1


def test_calibrations_are_read_back(tmp_path: Path) -> None:
    found, path = calibration(2, 0.1), tmp_path / "of" / "llama" / "calibration.json"
    on = MeasuredOn("llama", "12ab", 4, 2, None, "zigzag", 8, "34cd")
    file = CalibrationFile(on, found.samples, found.measured)
    file.save(path)
    again = load_calibration(path)
    assert again.measured_on == on
    sample = found.samples[3]
    same = found.degradation("kl", 600, sample)
    assert again.calibration.degradation("kl", 600, sample) == pytest.approx(same, rel=1e-3)
    assert "median_relative_error_on_held_out_prompts" in path.read_text()
    on.check_model("llama", "12ab")
    on.check_levels(Levels(Links(2), 4))
    # Ranks without others on their node have the same tokens either way.
    replace(on, ranks_per_node=1).check_levels(Levels(Links(1), 4, "contiguous"))
    with pytest.raises(ValueError, match=r"of another model .* make one by `distca tune sparsity"):
        on.check_model("qwen", "77")
    for levels in (
        *(Levels(Links(4), 4), Levels(Links(2), 8), Levels(Links(2, nodes_per_rack=1), 4)),
        Levels(Links(2), 4, "contiguous"),
    ):
        with pytest.raises(ValueError, match="is for 4 ranks, 2 a node in zigzag parts, not"):
            on.check_levels(levels)
    CalibrationFile(on, found.samples, found.measured[:5]).save(path)
    with pytest.raises(ValueError, match="lacks 3 of its 8 prompts, since it was interrupted"):
        _ = load_calibration(path).calibration
    with pytest.raises(ValueError, match=r"there is no calibration .*none.json: make one by"):
        load_calibration(tmp_path / "none.json")
    for text in ("", "[]", '{"format": 2}', path.read_text().replace('"kl": [', '"kl": [1, ')):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no calibration"):
            load_calibration(path)


def test_parts_of_a_bound_are_rounded_up() -> None:
    """What is free uses none of it, whatever the bound, and what is above it more than all."""
    bins, values = configure._BINS, np.array([0.0, 1e-6, 1.0, 2.0, 5.0])
    assert configure._parts(values, 0.0).tolist() == [0, *[bins + 1] * 4]
    assert configure._parts(values, 1.0).tolist() == [0, 1, bins, 2 * bins, 2 * bins]
    assert configure._parts(values, 2.0).tolist() == [0, 1, bins // 2, bins, 2 * bins]
