"""Batches of published lists of document lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from distca.documents.lengths import read_lengths
from distca.plan.span import Int64s

LISTS = ("document_lengths_wlbllm.json", "document_lengths_prolong.json")
"""Files of a folder that `--published` names: JSON lists of lengths."""


def published(path: Path, upsampled: bool) -> Callable[[int, int, int], Int64s]:
    """Makes a function that draws batches from a list: shuffled, capped, repeated if too short.

    Args:
        path: a JSON list of lengths.
        upsampled: keep all documents of 10,000 tokens or more, and one in ten of the others.
    """

    def make(total: int, longest: int, seed: int) -> Int64s:
        generator = np.random.default_rng(seed)
        lengths = read_lengths(path)
        if upsampled:
            lengths = lengths[(lengths >= 10_000) | (generator.random(len(lengths)) < 0.1)]
        lengths = np.minimum(lengths, longest)
        generator.shuffle(lengths)
        return _first(lengths, total)

    return make


def papers(path: Path, name: str) -> Callable[[int, int, int], Int64s]:
    """Makes a function that draws batches as the DistCA paper's public experiments do.

    "pretrain" lengthens all documents by the longest one over 64K, and then takes those of 64K or
    more four times and half of the others. "prolong" lengthens none, sets 30% of those of 64K or
    more to the longest length, and keeps their order; each batch begins elsewhere in the list.

    Args:
        path: a JSON list of lengths.
        name: "pretrain" or "prolong".
    """

    def make(total: int, longest: int, seed: int) -> Int64s:
        generator = np.random.default_rng(seed)
        lengths, long = read_lengths(path), 65_536
        if name == "pretrain":
            lengths = np.minimum(lengths * max(longest // long, 1), longest)
            kept = (lengths < long) & (generator.random(len(lengths)) < 0.5)
            lengths = np.concatenate([np.repeat(lengths[lengths >= long], 4), lengths[kept]])
            generator.shuffle(lengths)
            return _first(lengths, total)
        enlarged = (lengths >= long) & (generator.random(len(lengths)) < 0.3)
        lengths = np.minimum(np.where(enlarged, longest, lengths), longest)
        return _first(np.roll(lengths, -int(generator.integers(len(lengths)))), total)

    return make


def _first(lengths: Int64s, total: int) -> Int64s:
    """The first documents of that many tokens; the list is repeated if it is too short."""
    lengths = np.tile(lengths, -(-total // int(lengths.sum())))
    count = int(np.searchsorted(np.cumsum(lengths), total)) + 1
    lengths = lengths[:count].copy()
    lengths[-1] -= lengths.sum() - total
    return lengths
