"""Document lengths, drawn from named distributions or read from files.

    from distca.documents.lengths import DISTRIBUTIONS, draw
    lengths = draw(DISTRIBUTIONS["pretrain"], total_tokens=64 * 65536, seed=0)

Every length is drawn independently; `draw` cuts the last document off at the number of tokens. The
same seed gives the same lengths, and a draw of more tokens begins with the same documents.

The named distributions, with the data that they imitate:

* **pretrain**: web text with long documents upsampled by a threshold. 97.8% of the documents are
  uniform up to 6,400 tokens and 2.2% log-uniform from 8,192 to 131,072 (WLB-LLM's published
  lengths: mean 3,962, 0.5% of the documents above 64K with 12.8% of the tokens); then of those
  below 10,000 tokens one in ten is kept.
* **prolong**: a mixture of short and rare, very long documents: 99.95% are 575 tokens and a
  lognormal part with median 1,300 and sigma 1.1, the rest log-uniform from 32,768 to 340,000
  (ProLong's published lengths: median 1,913, 99th percentile 16,262, longest 340,149).
* **lognormal**: median 4,096, sigma 1.5, at most 131,072.
* **long-tail**: the same with sigma 2.
* **zipf**: a length `n` has a probability in proportion to `n ** -1.5`, from 256 to 131,072.
* **fixed**: all 8,192.

Distributions with other parameters are made from the classes below (`Lognormal`, `Zipf`, ...);
`Capped` cuts the documents of any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from distca.documents.index import read_index
from distca.json_files import check_file, parse_json, read_text
from distca.plan.span import Int64s

MOST_TOKENS = 2**32
"""Most tokens of the documents that are drawn: 32,768 sequences of 128K."""

_WANTED = "give a file with a JSON list of lengths, or the .idx of a Megatron dataset"

_CHUNK = 4096
"""Number of lengths drawn at a time, a constant, so that a longer draw begins with the same
lengths."""


class LengthDistribution(Protocol):
    """A distribution of document lengths."""

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws about `count` independent lengths of at least 1, int64."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Documents of one length."""

    length: int

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws lengths as `LengthDistribution.sample` says."""
        return np.full(count, self.length, dtype=np.int64)


@dataclass(frozen=True)
class Uniform:
    """Documents of lengths from `low` to `high`, all equally likely."""

    low: int
    high: int

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws lengths as `LengthDistribution.sample` says."""
        return generator.integers(self.low, self.high + 1, size=count)


@dataclass(frozen=True)
class Lognormal:
    """Documents of `offset` tokens and a lognormal part, at most `cap` together."""

    median: float
    sigma: float
    cap: int
    offset: int = 0

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws lengths as `LengthDistribution.sample` says."""
        drawn = self.offset + np.exp(generator.normal(np.log(self.median), self.sigma, size=count))
        return np.clip(drawn, 1, self.cap).astype(np.int64)


@dataclass(frozen=True)
class Zipf:
    """Documents of lengths `n` in `[low, cap]`, with probabilities as `n ** -exponent`.

    Exponent 1 is log-uniform. Lengths are drawn from the continuous law and rounded down.
    """

    exponent: float
    low: int
    cap: int

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws lengths as `LengthDistribution.sample` says."""
        uniform, power = generator.random(count), 1.0 - self.exponent
        ratio = self.cap / self.low
        if abs(power) < 1e-9:
            drawn = self.low * ratio**uniform
        else:
            drawn = self.low * (1 + uniform * (ratio**power - 1)) ** (1 / power)
        return np.clip(drawn, self.low, self.cap).astype(np.int64)


@dataclass(frozen=True)
class Mixture:
    """Documents of two distributions: a `share` of them from `second`, the others from `first`."""

    first: LengthDistribution
    second: LengthDistribution
    share: float

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws lengths as `LengthDistribution.sample` says."""
        is_second = generator.random(count) < self.share
        both = (self.first.sample(generator, count), self.second.sample(generator, count))
        return np.where(is_second, both[1], both[0])


@dataclass(frozen=True)
class Upsampled:
    """Documents of `base`; those shorter than `threshold` are kept at a rate of `keep`."""

    base: LengthDistribution
    threshold: int
    keep: float

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws lengths as `LengthDistribution.sample` says, but fewer than `count`."""
        lengths = self.base.sample(generator, count)
        return lengths[(lengths >= self.threshold) | (generator.random(count) < self.keep)]


@dataclass(frozen=True)
class Collection:
    """Documents drawn from a given collection, with replacement."""

    lengths: tuple[int, ...]

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws lengths as `LengthDistribution.sample` says."""
        return generator.choice(np.array(self.lengths, dtype=np.int64), size=count)


@dataclass(frozen=True)
class Capped:
    """Documents of another distribution, cut off at `cap` tokens."""

    base: LengthDistribution
    cap: int

    def sample(self, generator: np.random.Generator, count: int) -> Int64s:
        """Draws lengths as `LengthDistribution.sample` says."""
        return np.minimum(self.base.sample(generator, count), self.cap)


DISTRIBUTIONS: dict[str, LengthDistribution] = {
    "pretrain": Upsampled(Mixture(Uniform(1, 6400), Zipf(1.0, 8192, 131072), 0.022), 10_000, 0.1),
    "prolong": Mixture(Lognormal(1300, 1.1, 340_000, 575), Zipf(1.0, 32768, 340_000), 0.0005),
    "lognormal": Lognormal(4096, 1.5, 131_072),
    "long-tail": Lognormal(4096, 2.0, 131_072),
    "zipf": Zipf(1.5, 256, 131_072),
    "fixed": Fixed(8192),
}


def draw(distribution: LengthDistribution, total_tokens: int, seed: int) -> Int64s:
    """Draws lengths with the sum `total_tokens`, int64; the last document is cut off there.

    Raises:
        ValueError: `total_tokens` is not positive, or more than can be planned.
    """
    check_tokens(total_tokens)
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


def check_tokens(total: int) -> None:
    """Refuses a number of tokens that cannot be drawn as documents.

    Raises:
        ValueError: it is not positive, or more than can be planned.
    """
    if not 1 <= total <= MOST_TOKENS:
        raise ValueError(
            f"cannot draw documents of {total:,} tokens: give at least 1 and at most "
            f"{MOST_TOKENS:,} in all"
        )


def read_lengths(path: Path) -> Int64s:
    """Reads document lengths from a JSON list of integers or a Megatron index (`.idx`), int64.

    Raises:
        ValueError: the file is missing, cannot be read or is neither, or a length is not positive.
    """
    if path.suffix == ".idx":
        check_file(path, _WANTED)
        lengths = read_index(path).document_lengths()
        return lengths[lengths > 0]
    found = parse_json(read_text(path, _WANTED), str(path), "give a list of lengths")
    return checked_lengths(found, str(path))


def checked_lengths(found: object, source: str) -> Int64s:
    """Checks a list of document lengths, and returns it as int64.

    Raises:
        ValueError: `found` is not a list of integers of at least 1, or is empty.
    """
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ValueError(
            f"{source} holds no list of document lengths: give JSON such as [512, 8192, 77]"
        )
    for number, length in enumerate(found):
        if not isinstance(length, int) or isinstance(length, bool):
            raise ValueError(
                f"{source}: document {number} has the length {length!r}, which is no integer"
            )
        if length < 1:
            raise ValueError(
                f"{source}: document {number} has {length} tokens: every length must be at least 1"
            )
    if sum(length * (length + 1) // 2 for length in found) >= 2**63:
        raise ValueError(
            f"{source} has {sum(found):,} tokens, with more than 2^63 pairs of query and key: give "
            "shorter documents"
        )
    return np.array(found, dtype=np.int64)


def cut_to_pieces(lengths: Int64s, longest: int) -> Int64s:
    """Cuts documents into pieces of at most `longest` tokens, int64."""
    pieces = -(-lengths // longest)
    cut = np.full(int(pieces.sum()), longest, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * longest
    return cut


def shuffled(lengths: Int64s, tokens: int, seed: int) -> Int64s:
    """Draws documents of a corpus in random order, int64; the last one is cut off at `tokens`.

    Args:
        lengths: tokens of each document of the corpus, int64.
        tokens: tokens to draw, in as many epochs as it takes, each in its own order.
        seed: seed of the orders.
    """
    generator = np.random.default_rng(seed)
    epochs = -(-tokens // int(lengths.sum()))
    drawn = np.concatenate([generator.permutation(lengths) for _ in range(epochs)])
    until = np.cumsum(drawn)
    count = int(np.searchsorted(until, tokens)) + 1
    drawn = drawn[:count].copy()
    drawn[-1] -= until[count - 1] - tokens
    return drawn
