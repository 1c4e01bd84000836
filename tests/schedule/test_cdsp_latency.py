"""Eq. 1 of Tetris: its fit, its inverse and its file; improvement rates and decode ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca.schedule.serving.cdsp import (
    TABLE_1,
    Coefficients,
    ImprovementRates,
    Load,
    Prefill,
    PrefillModel,
    least_by_rate,
    published_model,
)
from distca.schedule.serving.cdsp.load import IMPROVEMENT_RATES
from distca.simulate.requests.decode_ranks import DecodeRank, choose_decode_rank

MODEL = published_model()


def test_the_fit_is_within_7_percent_of_every_row_and_least_squares_is_not() -> None:
    assert max(map(abs, MODEL.errors(TABLE_1))) <= 0.07
    worst = 0.0
    for degree in MODEL.degrees:
        rows = [each for each in TABLE_1 if each.degree == degree]
        tokens = np.array([each.tokens for each in rows]) / 1e5
        seconds = np.array([each.seconds for each in rows])
        columns = np.stack([np.ones_like(tokens), tokens, tokens**2], 1)
        found = columns @ np.linalg.lstsq(columns, seconds, rcond=None)[0]
        worst = max(worst, float(np.abs(found / seconds - 1).max()))
    assert worst > 0.15


def test_a_cache_is_known_only_from_prefills_after_one() -> None:
    assert all(of.c == 2 * of.d for of in MODEL.coefficients.values())
    truth = Coefficients(0.1, 2e-5, 5e-10, 1e-10)
    exact = PrefillModel("", "", {4: truth})
    sizes = [(0, 1000), (0, 9000), (4000, 5000), (60_000, 500), (9000, 9000), (0, 70_000)]
    measured = [Prefill(4, new, exact.seconds(4, cached, new), cached) for cached, new in sizes]
    fitted = PrefillModel.fit(measured, "", "").coefficients[4]
    for name in "abcd":
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-6)


def test_coefficients_are_never_negative() -> None:
    """Times that grow less than in proportion would give d < 0, and no largest chunk."""
    measured = [Prefill(2, tokens, tokens**0.8) for tokens in (1000, 2000, 4000, 8000)]
    assert PrefillModel.fit(measured, "", "").coefficients[2].d == 0
    # Of times that noise lets fall with the tokens the fit grows all the same.
    measured = [Prefill(2, tokens, 1 / tokens) for tokens in (10, 20, 30)]
    noisy = PrefillModel.fit(measured, "", "")
    assert noisy.seconds(2, 0, 30) > noisy.seconds(2, 0, 10)


@pytest.mark.parametrize("degree", MODEL.degrees)
def test_tokens_within_is_the_inverse(degree: int) -> None:
    for cached in (0, 7, 100_000):
        for tokens in (1, 5, 4096, 123_457):
            seconds = MODEL.seconds(degree, cached, tokens)
            assert abs(MODEL.tokens_within(degree, cached, seconds) - tokens) <= 1
            most = MODEL.tokens_within(degree, cached, seconds * 1.3)
            assert MODEL.seconds(degree, cached, most) <= seconds * 1.3 + 1e-12
            assert MODEL.seconds(degree, cached, most + 1) > seconds * 1.3 - 1e-12
        assert MODEL.tokens_within(degree, cached, MODEL.coefficients[degree].a) == 0
        assert MODEL.tokens_within(degree, cached, -1.0) == 0


def test_the_file_gives_the_model_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "prefill.json"
    MODEL.save(path)
    assert PrefillModel.load(path) == MODEL
    assert len(path.read_text().splitlines()) == len(MODEL.degrees) + 6


@pytest.mark.parametrize("text", ["[]", "{", '{"coefficients": {"1": {"a": 1}}}', "3"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prefill.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no prefill times"):
        PrefillModel.load(path)
    if text != "[]":
        return
    with pytest.raises(ValueError, match="holds no improvement rates"):
        ImprovementRates.load(path)


def test_bad_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="not of llama-70b on dgx-a100"):
        MODEL.check_is_of("dgx-a100", "llama-70b")
    with pytest.raises(ValueError, match="on dgx-h100: measure"):
        MODEL.check_is_of("dgx-h100", "llama-8b")
    MODEL.check_is_of("dgx-a100", "llama-8b")
    with pytest.raises(ValueError, match="degree 3 is not a power of two"):
        PrefillModel.fit([replace(each, degree=3) for each in TABLE_1[:6]], "", "")
    with pytest.raises(ValueError, match="degree 32 was not measured: choose from 1, 2, 4"):
        MODEL.only([1, 32])
    with pytest.raises(ValueError, match="no degree was measured"):
        PrefillModel.fit([], "", "")
    with pytest.raises(ValueError, match="at least three lengths"):
        PrefillModel.fit(TABLE_1[:2], "", "")
    for wrong in (Prefill(1, 4096, 0.0), Prefill(1, 0, 1.0), Prefill(1, 9, 1.0, cached=-1)):
        with pytest.raises(ValueError, match="cannot have been measured"):
            PrefillModel.fit([*TABLE_1[:6], wrong], "", "")
    with pytest.raises(ValueError, match="must not be negative"):
        Coefficients(-1.0, 1.0, 0.0, 0.0)


def test_the_improvement_rate_is_that_of_the_last_30_seconds(tmp_path: Path) -> None:
    found = [(0.5, 0.05, 1.0), (0.5, 0.45, 1.1), (4.0, 0.05, 9.0), (4.0, (0.45, 8), 7.0)]
    assert [*IMPROVEMENT_RATES] == pytest.approx(np.arange(0.05, 0.8, 0.1))
    rates = least_by_rate(found)
    assert rates == ImprovementRates({0.5: 0.05, 4.0: (0.45, 8)})
    rates.save(tmp_path / "rates.json")
    assert ImprovementRates.load(tmp_path / "rates.json") == rates
    load = Load(rates)
    for number in range(120):
        load.arrived(number * 0.25)
    assert load.per_second(29.9) == 4
    assert load.growth(29.9) == (0.45, 8)
    assert load.per_second(44.875) == 2
    assert load.growth(44.875) == (0.05, math.inf)
    assert load.per_second(1000.0) == 0
    # The route to set them.
    load.rates = ImprovementRates({1.0: 0.6})
    assert load.growth(1000.0) == (0.6, math.inf)
    for wrong in ({}, {1.0: 1.0}, {-1.0: 0.1}, {1.0: (0.1, 0)}):
        with pytest.raises(ValueError, match="improvement rate"):
            ImprovementRates(wrong)


def test_the_freest_decode_rank_counts_what_is_under_way() -> None:
    ranks = [DecodeRank(100, used=20, batch=2), DecodeRank(100, used=60, batch=1)]
    assert choose_decode_rank(ranks, 10) == 0, "40 each, and the first"
    assert choose_decode_rank([replace(ranks[0], virtual=10), ranks[1]], 10) == 1
    assert choose_decode_rank([replace(ranks[0], virtual=10), ranks[1]], 50) == 0
    assert choose_decode_rank([DecodeRank(100), DecodeRank(100, virtual=1)], 100) == 0
    assert choose_decode_rank(ranks, 81) is None, "it must wait"
    with pytest.raises(ValueError, match="101 blocks is larger than the largest pool"):
        choose_decode_rank(ranks, 101)
