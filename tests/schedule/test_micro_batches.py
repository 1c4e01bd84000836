"""Sharing documents out over the micro-batches of a global batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.plan import Mask, place_in_turn
from distca.plan.plan import max_over_mean
from distca.plan.span import Int64s
from distca.schedule import document_loads, share_out
from support.batches import long_tailed_lengths


def windows_of(lengths: Int64s, count: int, tokens: int) -> tuple[Int64s, Int64s]:
    """Documents cut at the windows' ends, and the window of each."""
    at = place_in_turn(lengths, np.full(count, tokens))
    return at.end - at.start, at.rank


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(50, 5000), st.integers(1, 400))
def test_every_micro_batch_keeps_its_tokens(
    seed: int, count: int, tokens: int, median: int
) -> None:
    lengths = long_tailed_lengths(seed, count * tokens, median, tokens)
    lengths, windows = windows_of(lengths, count, tokens)
    loads = document_loads(lengths, Mask(), None)
    shared = share_out(lengths, loads, windows)
    assert np.bincount(shared, weights=lengths, minlength=count).tolist() == [tokens] * count
    before, after = (
        np.bincount(by, weights=loads, minlength=count).max() for by in (windows, shared)
    )
    assert after <= before
    assert np.array_equal(share_out(lengths, loads, windows), shared)


@pytest.mark.parametrize("seed", range(5))
def test_many_short_documents_fit_exactly(seed: int) -> None:
    count, tokens = 4, 65536
    lengths = long_tailed_lengths(seed, count * tokens, 500, 8192)
    lengths, windows = windows_of(lengths, count, tokens)
    loads = document_loads(lengths, Mask(), None)
    before, after = (
        max_over_mean(np.bincount(by, weights=loads, minlength=count))
        for by in (windows, share_out(lengths, loads, windows))
    )
    assert before > 1.05
    assert after < 1.02


def test_what_cannot_be_improved_stays_as_it_came() -> None:
    windows = np.array([0, 0, 1, 1])
    for lengths in (np.array([8, 8, 8, 8]), np.array([9, 7, 13, 3])):
        shared = share_out(lengths, document_loads(lengths, Mask(), None), windows)
        assert shared is windows
    one = np.zeros(4, dtype=np.int64)
    assert share_out(np.array([1, 2, 3, 4]), np.ones(4), one) is one
