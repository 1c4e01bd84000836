"""Cases of a test of which few run without `--full`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Case = tuple[Any, ...]


def of_all(cases: Iterable[Case], chosen: Callable[[list[Case]], list[Case]]) -> list[Any]:
    """Cases for `parametrize`: those that are not chosen have the mark `full`."""
    listed = list(cases)
    few = chosen(listed)
    return [pytest.param(*case, marks=[] if case in few else [pytest.mark.full]) for case in listed]


def pairwise(cases: list[Case]) -> list[Case]:
    """Chooses few cases in which any two values meet that meet in one of all."""
    missing = set().union(*map(_pairs, cases))
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & _pairs(case))))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


def alternating(cases: list[Case]) -> list[Case]:
    """Chooses each value of the first dimension once, with those of the others in turn."""
    values = list(dict.fromkeys(case[0] for case in cases))
    chosen = []
    for number, value in enumerate(values):
        its = [case for case in cases if case[0] == value]
        chosen.append(its[number % len(its)])
    return chosen
