"""Seconds of a prefill by Eq. 1 of Tetris, fitted to measured prefills and kept in a small file.

    model = PrefillModel.fit(measured, hardware="A100", model="llama-8b")
    model.save(Path("prefill.json"))
    PrefillModel.load(Path("prefill.json")).seconds(8, cached=0, tokens=32768)

With `s` ranks, `L` new tokens after `C` cached ones take `a + b L + c C L + d L^2` seconds, where
all four coefficients depend on `s`. Two things are not as in the paper:

* the fit is by relative errors. Plain least squares serves the longest prompts alone: it is 20% off
  at 4K tokens of the paper's own Table 1, where relative errors stay below 7%;
* without prefills after a cache `c` cannot be known, and is `2 d`: a new token sees all of the
  cached ones, but half of the new ones.

The prefills of the paper's Table 1 are here, too: Llama-3 8B on A100s.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from distca.json_files import read_text
from distca.whole_file import write_text


class PrefillTimes(Protocol):
    """What planning must know of a prefill's time."""

    @property
    def degrees(self) -> Sequence[int]:
        """Degrees of sequence parallelism that can be chosen, ascending."""
        ...

    def seconds(self, degree: int, cached: int, tokens: int) -> float:
        """Returns the seconds to prefill new tokens after cached ones."""
        ...

    def tokens_within(self, degree: int, cached: int, seconds: float) -> int:
        """Returns the most new tokens that take at most so long; 0 if none do."""
        ...


@dataclass(frozen=True)
class Prefill:
    """A measured prefill: one request alone on `degree` ranks."""

    degree: int
    tokens: int
    seconds: float
    cached: int = 0


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of Eq. 1 for one degree, none of them negative.

    Attributes:
        a: seconds of every prefill.
        b: seconds of a new token, for its linear layers.
        c: seconds of a pair of a new and a cached token.
        d: seconds of a pair of two new tokens, visible or not.
    """

    a: float
    b: float
    c: float
    d: float

    def __post_init__(self) -> None:
        values = asdict(self).values()
        if not all(math.isfinite(value) and value >= 0 for value in values) or self.b + self.d <= 0:
            raise ValueError(
                f"{self}: coefficients must not be negative, and b or d be positive: "
                "fit them to measured prefills again"
            )


@dataclass(frozen=True)
class PrefillModel:
    """Eq. 1 for each degree of sequence parallelism of a model on some hardware.

    Attributes:
        hardware: device that was measured.
        model: model that was measured, with its tensor-parallel size where that is not 1.
        coefficients: by degree, ascending.

    Raises:
        ValueError: there are none, or a degree is not a power of two.
    """

    hardware: str
    model: str
    coefficients: Mapping[int, Coefficients]

    def __post_init__(self) -> None:
        if not self.coefficients:
            raise ValueError("no degree was measured: give prefills on 1, 2, 4, ... ranks")
        for degree in self.coefficients:
            if degree < 1 or degree & (degree - 1):
                raise ValueError(f"degree {degree} is not a power of two: leave it out")
        object.__setattr__(self, "coefficients", dict(sorted(self.coefficients.items())))

    @property
    def degrees(self) -> Sequence[int]:
        """Degrees that were measured, ascending."""
        return tuple(self.coefficients)

    def seconds(self, degree: int, cached: int, tokens: int) -> float:
        """Returns the seconds as `PrefillTimes.seconds` says."""
        of = self.coefficients[degree]
        return of.a + tokens * (of.b + of.c * cached + of.d * tokens)

    def tokens_within(self, degree: int, cached: int, seconds: float) -> int:
        """Returns the tokens as `PrefillTimes.tokens_within` says: the root of Eq. 1, rounded
        down."""
        of = self.coefficients[degree]
        left = seconds - of.a
        if left <= 0:
            return 0
        linear = of.b + of.c * cached
        # This form of the root holds for d = 0, too, and doesn't cancel.
        return int(2 * left / (linear + math.sqrt(linear * linear + 4 * of.d * left)))

    def only(self, degrees: Iterable[int]) -> PrefillModel:
        """Returns the model with some degrees alone.

        Raises:
            ValueError: one of them was not measured.
        """
        chosen = {}
        for degree in degrees:
            if degree not in self.coefficients:
                known = ", ".join(map(str, self.coefficients))
                raise ValueError(f"degree {degree} was not measured: choose from {known}")
            chosen[degree] = self.coefficients[degree]
        return PrefillModel(self.hardware, self.model, chosen)

    def check_is_of(self, hardware: str, model: str) -> None:
        """Refuses a fit of other hardware or of another model.

        Raises:
            ValueError: it is one.
        """
        if (self.hardware, self.model) != (hardware, model):
            raise ValueError(
                f"the prefill times are of {self.model} on {self.hardware}, not of {model} on "
                f"{hardware}: measure prefills there, and fit them"
            )

    def errors(self, measured: Iterable[Prefill]) -> list[float]:
        """Returns the relative error of each measured prefill's time; 0.05 is 5% too long."""
        return [
            self.seconds(each.degree, each.cached, each.tokens) / each.seconds - 1
            for each in measured
        ]

    @classmethod
    def fit(cls, measured: Sequence[Prefill], hardware: str, model: str) -> PrefillModel:
        """Fits the coefficients of each degree by least squares of relative errors.

        Raises:
            ValueError: a measurement is out of range, or a degree has fewer than three lengths.
        """
        for each in measured:
            if each.tokens < 1 or each.cached < 0 or not 0 < each.seconds < math.inf:
                raise ValueError(f"{each} cannot have been measured: give tokens and seconds")
        return cls(
            hardware,
            model,
            {
                degree: _fit_degree([each for each in measured if each.degree == degree])
                for degree in {each.degree for each in measured}
            },
        )

    def save(self, path: Path) -> None:
        """Writes the model as JSON, with a line for each degree."""
        lines = [f'  "{s}": {json.dumps(asdict(of))}' for s, of in self.coefficients.items()]
        write_text(
            path,
            f'{{\n "hardware": {json.dumps(self.hardware)},\n "model": {json.dumps(self.model)},\n'
            ' "coefficients": {\n' + ",\n".join(lines) + "\n }\n}\n",
        )

    @classmethod
    def load(cls, path: Path) -> PrefillModel:
        """Reads what `save` wrote.

        Raises:
            ValueError: it is something else.
        """
        text = read_text(path, "measure prefill times by `distca tune groups`")
        try:
            saved = json.loads(text)
            coefficients = {
                int(degree): Coefficients(**{name: float(value) for name, value in of.items()})
                for degree, of in saved["coefficients"].items()
            }
            return cls(str(saved["hardware"]), str(saved["model"]), coefficients)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no prefill times as PrefillModel.save wrote") from error


def _fit_degree(measured: Sequence[Prefill]) -> Coefficients:
    """Fits one degree. Among all choices of coefficients that are 0, the best has none negative and
    grows with a prompt's tokens, also where short ones were measured in noise."""
    if len({(each.cached, each.tokens) for each in measured}) < 3:
        raise ValueError(f"degree {measured[0].degree}: measure prefills of at least three lengths")
    tokens = np.array([each.tokens for each in measured], dtype=np.float64)
    cached = np.array([each.cached for each in measured], dtype=np.float64)
    columns = [np.ones_like(tokens), tokens, tokens * cached, tokens**2]
    if not cached.any():
        columns.pop(2)
    seconds = np.array([each.seconds for each in measured])
    # Columns of one size keep the squares of 10^5 tokens from being lost beside the constant.
    sizes = [float(column.max()) for column in columns]
    matrix = np.stack([c / s for c, s in zip(columns, sizes, strict=True)], 1) / seconds[:, None]
    best, least = np.zeros(len(columns)), math.inf
    growing = [1, len(columns) - 1]
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), count):
            solution = np.linalg.lstsq(matrix[:, chosen], np.ones(len(seconds)), rcond=None)[0]
            error = float(np.sum((matrix[:, chosen] @ solution - 1) ** 2))
            values = np.zeros(len(columns))
            values[list(chosen)] = solution
            if (values >= 0).all() and values[growing].any() and error < least:
                best, least = values, error
    fitted = [float(value / size) for value, size in zip(best, sizes, strict=True)]
    if len(fitted) == 3:
        fitted.insert(2, 2 * fitted[2])
    return Coefficients(*fitted)


_SECONDS = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}

TABLE_1 = tuple(
    Prefill(degree, 4096 << doubled, seconds)
    for degree, row in _SECONDS.items()
    for doubled, seconds in enumerate(row)
)
"""Seconds by degree and length, from 4K tokens on; one rank has no memory for 256K."""


def published_model() -> PrefillModel:
    """Fits Eq. 1 to Table 1."""
    return PrefillModel.fit(TABLE_1, "dgx-a100", "llama-8b")
