"""Ratios of seconds, and the ranges in which they lie."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distca.simulate.speed_up import SpeedUp, enough_batches


def test_a_ratio_of_sums_and_its_range() -> None:
    found = SpeedUp.of([1.0, 3.0], [1.1, 3.3])
    assert [found.low, found.mean, found.high] == pytest.approx([1.1, 1.1, 1.1])
    assert (found.faster, found.batches) == (True, 2)
    # By hand: 2.5 / 2, residuals of -0.05 and 0.05, Student's quantile of one degree of freedom.
    found = SpeedUp.of([1.0, 1.0], [1.2, 1.3])
    assert found.mean == 1.25
    assert found.high - found.mean == pytest.approx(12.706 * math.sqrt(0.005 / 2))
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert found.faster is None


def test_no_ratio_is_below_0() -> None:
    found = SpeedUp.of([1.0, 1.0], [1.0, 1.5])
    assert str(found) == "1.250 (0.000 to 4.426)"
    assert found.inverse().high == math.inf


def test_the_other_way_round() -> None:
    found = SpeedUp.of([1.2, 1.19, 1.21], [1.0, 1.0, 1.0])
    assert found.faster is False
    inverse = found.inverse()
    assert inverse.faster is True
    assert inverse.low < inverse.mean < inverse.high
    assert inverse.mean == pytest.approx(1 / found.mean)
    assert str(inverse) == f"{inverse.mean:.3f} ({inverse.low:.3f} to {inverse.high:.3f})"


def test_one_batch_has_no_range() -> None:
    found = SpeedUp.of([1.0], [2.0])
    assert (str(found), found.faster) == ("2.000", None)
    assert math.isnan(found.low)


@pytest.mark.parametrize("batches", [3, 12, 24])
def test_the_range_holds_the_truth_in_19_of_20_cases(batches: int) -> None:
    draws = np.random.default_rng(0)
    ours = draws.normal(10, 0.5, (4000, batches))
    # The same documents make both slow; the rest of the spread is their own.
    others = 1.02 * ours + draws.normal(0, 0.15, ours.shape)
    found = [SpeedUp.of(a, b) for a, b in zip(ours, others, strict=True)]
    held = np.mean([each.low <= 1.02 <= each.high for each in found])
    assert held == pytest.approx(0.95, abs=0.015)


def test_fewer_large_batches_are_enough() -> None:
    numbers = [enough_batches(sequences) for sequences in (1, 16, 32, 64, 96, 512)]
    assert numbers == [24, 24, 12, 6, 4, 4]
