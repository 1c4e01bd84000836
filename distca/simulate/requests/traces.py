"""Traces of requests: lengths and arrival times, of a file, or like the Tetris paper's."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from distca.json_files import read_text

K = 1024


@dataclass(frozen=True)
class Request:
    """A request: its arrival in seconds, and tokens of its prompt and of its answer."""

    arrival: float
    prompt: int
    answer: int


@dataclass(frozen=True)
class RequestTrace:
    """Requests in the order in which they arrive."""

    requests: tuple[Request, ...]

    @property
    def per_second(self) -> float:
        """Requests a second, from time 0 to the last arrival."""
        last = self.requests[-1].arrival
        return len(self.requests) / last if last > 0 else math.inf

    def at_rate(self, per_second: float) -> RequestTrace:
        """Returns the trace with arrival times stretched to that many requests a second."""
        factor = self.per_second / per_second
        return RequestTrace(
            tuple(Request(r.arrival * factor, r.prompt, r.answer) for r in self.requests)
        )


@dataclass(frozen=True)
class Preset:
    """Prompt lengths of a published trace: a log-normal that is cut off.

    The paper gives shortest, longest and mean alone. Sigma and the answers are ours.

    Attributes:
        shortest, longest, mean: tokens.
        sigma: that of the logarithm, before the cut.
        answer: tokens of every answer.
    """

    shortest: float
    longest: float
    mean: float
    sigma: float = 0.75
    answer: int = 256

    def location(self) -> float:
        """Returns the logarithm's mean before the cut that gives the mean after it; found by
        bisection."""
        low, high = math.log(self.shortest) - 9, math.log(self.longest) + 9
        while high - low > 1e-9:
            middle = (low + high) / 2
            if self._mean_at(middle) < self.mean:
                low = middle
            else:
                high = middle
        return low

    def _mean_at(self, location: float) -> float:
        below = NormalDist(location, self.sigma).cdf
        shifted = NormalDist(location + self.sigma**2, self.sigma).cdf
        first, last = math.log(self.shortest), math.log(self.longest)
        share = below(last) - below(first)
        if share < 1e-12:
            return self.shortest if location < first else self.longest
        whole = math.exp(location + self.sigma**2 / 2)
        return whole * (shifted(last) - shifted(first)) / share


PRESETS = {
    "short": Preset(4 * K, 95 * K, 23.6 * K),
    "medium": Preset(8 * K, 142 * K, 32.8 * K),
    "long": Preset(16 * K, 190 * K, 50.1 * K),
}
"""The paper's three traces, Section 7.1."""


def draw_trace(preset: Preset, count: int, seed: int) -> RequestTrace:
    """Draws requests that arrive as a Poisson process, one a second on average."""
    drawn = np.random.default_rng(seed)
    location, prompts = preset.location(), np.zeros(0)
    while len(prompts) < count:
        more = np.exp(drawn.normal(location, preset.sigma, 2 * count))
        kept = (more >= preset.shortest) & (more <= preset.longest)
        prompts = np.concatenate([prompts, more[kept]])[:count]
    arrivals = np.cumsum(drawn.exponential(1.0, count))
    return RequestTrace(
        tuple(
            Request(float(arrival), int(prompt), preset.answer)
            for arrival, prompt in zip(arrivals, prompts, strict=True)
        )
    )


def read_trace(path: Path) -> RequestTrace:
    """Reads requests: a JSON list of objects with `arrival`, `prompt` and `answer`.

    Raises:
        ValueError: it is something else, or a value is out of range.
    """
    form = 'a JSON list such as [{"arrival": 0.5, "prompt": 20000, "answer": 256}]'
    text = read_text(path, f"give {form}")
    try:
        rows = json.loads(text)
        requests = [Request(float(r["arrival"]), int(r["prompt"]), int(r["answer"])) for r in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no trace: give {form}") from error
    for number, request in enumerate(requests):
        if not 0 <= request.arrival < math.inf or min(request.prompt, request.answer) < 1:
            raise ValueError(f"{path}, request {number}: {request} is out of range: give {form}")
    if not requests:
        raise ValueError(f"{path} has no requests: give {form}")
    return RequestTrace(tuple(sorted(requests, key=lambda request: request.arrival)))
