"""Batches of published lists of document lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from distca.documents.lengths import read_lengths
from distca.plan.span import Int64s


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
        lengths = np.tile(lengths, -(-total // int(lengths.sum())))
        count = int(np.searchsorted(np.cumsum(lengths), total)) + 1
        lengths = lengths[:count].copy()
        lengths[-1] -= lengths.sum() - total
        return lengths

    return make
