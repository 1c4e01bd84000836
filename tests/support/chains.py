"""Chains whose earlier turns lie anywhere, for tests of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan import Placement
from distca.plan.span import Int64s
from distca.schedule.serving.partitions import Chain


@dataclass(frozen=True)
class AfterAnywhere:
    """A `Sharding` of first turns in pieces of any lengths on any ranks, and of later ones."""

    chain: Chain

    def __call__(self, starts: Int64s, ends: Int64s) -> Placement:
        """Shards new tokens of sequences."""
        if starts.any():
            return self.chain(starts, ends)
        random, ranks = np.random.default_rng(0), self.chain.ranks
        cuts = [np.unique([0, *random.integers(0, end, 6), end]) for end in ends.tolist()]
        document = np.repeat(np.arange(len(ends)), [len(each) - 1 for each in cuts])
        start = np.concatenate([each[:-1] for each in cuts])
        end = np.concatenate([each[1:] for each in cuts])
        return Placement(document, start, end, random.integers(0, ranks, len(start)), ranks)
