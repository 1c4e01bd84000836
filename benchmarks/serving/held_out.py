"""Fits of a simulator's rates and overheads to published numbers, judged on numbers held out.

The numbers are split into halves by a seed. On one half the parameters are fitted by least squares
of the logarithms of ours over published, and the other half says how large the errors are; then
the halves are swapped. Parameters that a half says nothing about stay near where they start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distca.plan.span import Floats

Values = Mapping[str, float]
_STEP = 0.05
"""Change of a parameter's logarithm over which its effect is taken."""


@dataclass(frozen=True)
class Parameter:
    """What is fitted.

    Attributes:
        start: value before any fit.
        most: largest value.
        what: meaning and unit, for tables.
    """

    start: float
    most: float
    what: str


class Problem(Protocol):
    """Numbers and what predicts them."""

    def residuals(self, values: Values, numbers: Sequence[int], changed: str | None) -> Floats:
        """Returns the logarithm of ours over published of each number, `[numbers]`.

        Args:
            values: value of each parameter.
            numbers: which numbers.
            changed: the parameter that differs from the last call without one; None: any.
        """
        ...


def halves(groups: Sequence[object], seed: int) -> tuple[list[int], list[int]]:
    """Splits numbers into halves at random, with half of each group in either.

    Args:
        groups: group of each number.
        seed: seed of the split.

    Returns:
        The numbers of both halves, rising.
    """
    drawn = np.random.default_rng(seed)
    first: list[int] = []
    order = dict.fromkeys(groups)
    for group in order:
        members = [number for number, each in enumerate(groups) if each == group]
        shuffled = drawn.permutation(members).tolist()
        # The odd one of a group goes to either half.
        odd = len(shuffled) % 2 and int(drawn.integers(2))
        first += shuffled[: len(shuffled) // 2 + odd]
    chosen = set(first)
    return sorted(chosen), [number for number in range(len(groups)) if number not in chosen]


def fit(
    problem: Problem,
    parameters: Mapping[str, Parameter],
    numbers: Sequence[int],
    rounds: int = 6,
    prior: float = 0.05,
    start: Values | None = None,
) -> dict[str, float]:
    """Fits parameters by damped least squares (Levenberg-Marquardt) of their logarithms.

    Args:
        problem: predicts numbers.
        parameters: what is fitted.
        numbers: numbers that are fitted to.
        rounds: steps at most.
        prior: weight of a parameter's distance from its start, in logarithms, beside a number's
            error.
        start: values of the first step, and those of what is not fitted; None: the parameters'.
    """
    names = [*parameters]
    begin = np.log([parameters[name].start for name in names])
    most = np.log([parameters[name].most for name in names])
    values = dict(start or {}) or {name: parameters[name].start for name in names}
    at = np.log([values[name] for name in names])

    def of(point: Floats) -> dict[str, float]:
        return values | dict(zip(names, np.exp(point).tolist(), strict=True))

    def cost(residuals: Floats, point: Floats) -> float:
        return float((residuals**2).sum() + (prior**2 * (point - begin) ** 2).sum())

    damping, errors = 1e-3, problem.residuals(of(at), numbers, None)
    for _ in range(rounds):
        columns = []
        for number, name in enumerate(names):
            moved = at.copy()
            moved[number] -= _STEP
            changed = problem.residuals(of(moved), numbers, name)
            columns.append((errors - changed) / _STEP)
        slopes = np.stack(columns, axis=1)
        squares = slopes.T @ slopes + prior**2 * np.eye(len(names))
        gradient = slopes.T @ errors + prior**2 * (at - begin)
        before = cost(errors, at)
        for _ in range(6):
            step = np.linalg.solve(squares + damping * np.eye(len(names)), -gradient)
            point = np.minimum(at + np.clip(step, -1, 1), most)
            found = problem.residuals(of(point), numbers, None)
            if cost(found, point) < before:
                break
            damping *= 10
        else:
            break
        at, errors, damping = point, found, damping / 10
        if cost(errors, at) > before * (1 - 1e-4):
            break
    return of(at)


@dataclass(frozen=True)
class Judged:
    """Errors on numbers that the fit did not see, both halves together.

    Attributes:
        values: values of the parameters, fitted on the first half and on the second.
        errors: ours over published, less one, `[numbers]`: of each by the fit that did not see it.
        seen: the same by the fit that saw it.
    """

    values: tuple[dict[str, float], dict[str, float]]
    errors: Floats
    seen: Floats

    @property
    def median(self) -> float:
        """Median of the held-out errors' sizes."""
        return float(np.median(np.abs(self.errors)))


def judge(
    problem: Problem,
    split: tuple[Sequence[int], Sequence[int]],
    fitted: Callable[[Sequence[int]], dict[str, float]],
) -> Judged:
    """Fits on either half, and predicts the other.

    Args:
        problem: predicts numbers.
        split: both halves.
        fitted: fits on numbers.
    """
    count = len(split[0]) + len(split[1])
    errors, seen = np.zeros(count), np.zeros(count)
    values = []
    for own, other in (split, split[::-1]):
        of = fitted(own)
        errors[[*other]] = np.expm1(problem.residuals(of, other, None))
        seen[[*own]] = np.expm1(problem.residuals(of, own, None))
        values.append(of)
    return Judged((values[0], values[1]), errors, seen)
