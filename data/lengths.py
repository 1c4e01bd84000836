"""Document lengths: drawn from named distributions, or read from files.

    from data.lengths import DISTRIBUTIONS, draw
    lengths = draw(DISTRIBUTIONS["pretrain"], total_tokens=64 * 65536, seed=0)

Every length is drawn independently; `draw` cuts the last document where the tokens are full. The
same seed gives the same lengths, and those of more tokens begin alike.

The named distributions, and what they imitate:

* **pretrain**: web text with long documents upsampled by a threshold. 97.8% of the documents are
  uniform up to 6,400 tokens and 2.2% log-uniform from 8,192 to 131,072 (WLB-LLM's published
  lengths: mean 3,962, 0.5% of the documents above 64K with 12.8% of the tokens); then of those
  below 10,000 tokens one in ten is kept.
* **prolong**: a mixture of short and rare, very long documents: 99.95% are 575 tokens and a
  lognormal part with median 1,300 and sigma 1.1, the rest log-uniform from 32,768 to 340,000
  (ProLong's published lengths: median 1,913, 99th percentile 16,262, longest 340,149).
* **lognormal**: median 4,096, sigma 1.5, at most 131,072.
* **zipf**: a length `n` has a probability in proportion to `n ** -1.5`, from 256 to 131,072.
* **fixed**: all 8,192.

Other parameters: make a `Lognormal`, `Zipf`, ... of your own. `capped` cuts any of them short.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from data.index import read_index
from distca.plan.span import Int64s

_CHUNK = 4096
"""Lengths are drawn so many at a time, whatever is needed, so that a longer draw begins alike."""


class LengthDistribution(Protocol):
    """Draws document lengths."""

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """About `count` independent lengths of at least 1, int64."""
        ...


@dataclass(frozen=True)
class Fixed:
    """All documents alike."""

    length: int

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """See `LengthDistribution.sample`."""
        return np.full(count, self.length, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Every length from `low` to `high` alike."""

    low: int
    high: int

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """See `LengthDistribution.sample`."""
        return generator.integers(self.low, self.high + 1, size=count)


@dataclass(frozen=True)
class Lognormal:
    """`offset` tokens and a lognormal part, at most `cap`."""

    median: float
    sigma: float
    cap: int
    offset: int = 0

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """See `LengthDistribution.sample`."""
        drawn = self.offset + np.exp(generator.normal(np.log(self.median), self.sigma, size=count))
        return np.clip(drawn, 1, self.cap).astype(np.int64)


@dataclass(frozen=True)
class Zipf:
    """A length `n` of `[low, cap]` with a probability in proportion to `n ** -exponent`.

    With exponent 1 it is log-uniform. Drawn from the continuous law and rounded down.
    """

    exponent: float
    low: int
    cap: int

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """See `LengthDistribution.sample`."""
        uniform, power = generator.random(count), 1.0 - self.exponent
        ratio = self.cap / self.low
        if abs(power) < 1e-9:
            drawn = self.low * ratio**uniform
        else:
            drawn = self.low * (1 + uniform * (ratio**power - 1)) ** (1 / power)
        return np.clip(drawn, self.low, self.cap).astype(np.int64)


@dataclass(frozen=True)
class Mixture:
    """Of each document one of two kinds: `share` of them are `second`."""

    first: LengthDistribution
    second: LengthDistribution
    share: float

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """See `LengthDistribution.sample`."""
        is_second = generator.random(count) < self.share
        both = (self.first.sample(generator, count), self.second.sample(generator, count))
        return np.where(is_second, both[1], both[0])


@dataclass(frozen=True)
class Upsampled:
    """Of the documents shorter than `threshold` only a share is kept."""

    base: LengthDistribution
    threshold: int
    keep: float

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """See `LengthDistribution.sample`; fewer than `count`."""
        lengths = self.base.sample(generator, count)
        return lengths[(lengths >= self.threshold) | (generator.random(count) < self.keep)]


@dataclass(frozen=True)
class Collection:
    """Documents of a given collection, in random order, with replacement."""

    lengths: tuple[int, ...]

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """See `LengthDistribution.sample`."""
        return generator.choice(np.array(self.lengths, dtype=np.int64), size=count)


@dataclass(frozen=True)
class Capped:
    """Documents of another distribution, none longer than `cap`: the rest of it is cut off."""

    base: LengthDistribution
    cap: int

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """See `LengthDistribution.sample`."""
        return np.minimum(self.base.sample(generator, count), self.cap)


DISTRIBUTIONS: dict[str, LengthDistribution] = {
    "pretrain": Upsampled(Mixture(Uniform(1, 6400), Zipf(1.0, 8192, 131072), 0.022), 10_000, 0.1),
    "prolong": Mixture(Lognormal(1300, 1.1, 340_000, 575), Zipf(1.0, 32768, 340_000), 0.0005),
    "lognormal": Lognormal(4096, 1.5, 131_072),
    "zipf": Zipf(1.5, 256, 131_072),
    "fixed": Fixed(8192),
}


def draw(distribution: LengthDistribution, total_tokens: int, seed: int) -> Int64s:
    """Lengths that sum up to `total_tokens`, the last document cut off there, int64.

    Raises:
        ValueError: `total_tokens` is not positive.
    """
    if total_tokens < 1:
        raise ValueError(f"cannot draw documents of {total_tokens} tokens: give at least 1")
    generator = np.random.default_rng(seed)
    chunks, tokens = [], 0
    while tokens < total_tokens:
        chunk = distribution.sample(generator, _CHUNK)
        chunks.append(chunk)
        tokens += int(chunk.sum())
    lengths = np.concatenate(chunks)
    until = np.cumsum(lengths)
    count = int(np.searchsorted(until, total_tokens)) + 1
    lengths = lengths[:count].copy()
    lengths[-1] -= until[count - 1] - total_tokens
    return lengths


def read_lengths(path: Path) -> Int64s:
    """Document lengths of a JSON list of integers, or of a Megatron index (`.idx`), int64.

    Raises:
        ValueError: the file is missing or is neither, or a length is not positive.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a JSON list of lengths or a Megatron .idx")
    if path.suffix == ".idx":
        lengths = read_index(path).document_lengths()
        return lengths[lengths > 0]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): give a list of document lengths") from error
    return checked_lengths(found, str(path))


def checked_lengths(found: object, source: str) -> Int64s:
    """A list of document lengths, int64.

    Raises:
        ValueError: it is no list of integers of at least 1, or it is empty.
    """
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ValueError(f"{source} holds no list of document lengths")
    for number, length in enumerate(found):
        if not isinstance(length, int) or isinstance(length, bool):
            raise ValueError(f"{source}: document {number} has the length {length!r}, no integer")
        if length < 1:
            raise ValueError(
                f"{source}: document {number} has {length} tokens: every length must be at least 1"
            )
    return np.array(found, dtype=np.int64)
