"""Masks of MagiAttention's public tests, written anew as rectangles: plans cover exactly those.

Its tests give a mask as rectangles of queries by keys, each full, or causal and aligned to the
lower right. What trees, two-way nodes, windows and chunks can say is here, at the sizes of its
small cases. Its inverse-causal and bi-causal rectangles are none of these: in them tokens before a
key alone see it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from distca.cost.volume import AttentionShape
from distca.plan import Mask, validate_plan
from distca.plan.paths import Paths
from distca.schedule import ScheduleConfig, TilesScheduler, even_capacities, make_scheduler
from support.random_trees import met

SHAPE = AttentionShape(8, 2, 128)
FULL, CAUSAL = "full", "causal"


class Case(NamedTuple):
    """A mask: rectangles `(first query, end, first key, end, kind)`, and the trees that have it."""

    rectangles: list[tuple[int, int, int, int, str]]
    lengths: list[int]
    parents: list[int]
    two_way: bool = True
    mask: Mask = Mask()


CUTS = [0, 128, 256, 384, 512, 640, 768]


def parts(*edges: int) -> list[tuple[int, int]]:
    return list(pairwise(edges))


CASES = {
    "full": Case([(0, 1024, 0, 1024, FULL)], [1024], [-1]),
    "several full ones": Case(
        [(a, b, a, b, FULL) for a, b in parts(*CUTS, 1050)], [128] * 6 + [282], [-1] * 7
    ),
    "causal ones": Case(
        [(a, b, a, b, CAUSAL) for a, b in parts(*CUTS, 1050)],
        *([128] * 6 + [282], [-1] * 7, False),
    ),
    "block-causal ones": Case(
        [(a, b, 0, b, FULL) for a, b in parts(*CUTS[:5])]
        + [(512, 640, 512, 640, FULL), (640, 768, 512, 768, FULL), (768, 960, 768, 960, FULL)],
        *([128] * 6 + [192], [-1, 0, 1, 2, -1, 4, -1]),
    ),
    # The same mask, by keys and not by queries.
    "block-causal ones by keys": Case(
        [(a, 512, a, b, FULL) for a, b in parts(*CUTS[:5])]
        + [(512, 768, 512, 640, FULL), (640, 768, 640, 768, FULL)],
        *([128] * 6, [-1, 0, 1, 2, -1, 4]),
    ),
    "uneven blocks": Case(
        [(a, b, 0, b, FULL) for a, b in parts(0, 150, 300, 450, 600)]
        + [(600, 750, 600, 750, FULL), (750, 900, 600, 900, FULL)],
        *([150] * 6, [-1, 0, 1, 2, -1, 4]),
    ),
    "a shared question": Case(
        [(0, 1024, 0, 128, FULL)] + [(a, b, a, b, FULL) for a, b in parts(128, 256, 512, 1024)],
        *([128, 128, 256, 512], [-1, 0, 0, 0]),
    ),
    "a shared question of causal answers": Case(
        [(0, 128, 0, 128, CAUSAL), (128, 1024, 0, 128, FULL)]
        + [(a, b, a, b, CAUSAL) for a, b in parts(128, 256, 512, 1024)],
        *([128, 128, 256, 512], [-1, 0, 0, 0], False),
    ),
    "a window": Case(
        # Of its last 100 keys: all causal ones without those before.
        [(q, q + 1, max(0, q - 99), q + 1, FULL) for q in range(600)],
        *([600], [-1], False, Mask(window_left=99)),
    ),
    "a window along the paths of a tree": Case(
        [(q, q + 1, max(0, q - 99), q + 1, FULL) for q in range(300)]
        + [
            (first + n, first + n + 1, low, high, FULL)
            for first in (300, 420)
            for n in range(120)
            for low, high in ((max(300 + n - 99, 0), 300), (first + max(n - 99, 0), first + n + 1))
            if high > low
        ],
        *([300, 120, 120], [-1, 0, 0], False, Mask(window_left=99)),
    ),
    "chunks": Case(
        [(a, b, a, b, CAUSAL) for a, b in parts(0, 128, 256, 384, 500)],
        *([500], [-1], False, Mask(attention_chunk=128)),
    ),
}


def seen(case: Case) -> np.ndarray:
    """How often each query meets each key, `[tokens, tokens]`."""
    total = sum(case.lengths)
    found = np.zeros((total, total), dtype=np.int64)
    for q, q_end, k, k_end, kind in case.rectangles:
        part = np.ones((q_end - q, k_end - k), dtype=np.int64)
        found[q:q_end, k:k_end] += (
            np.tril(part, k_end - k - (q_end - q)) if kind == CAUSAL else part
        )
    return found


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_a_plan_covers_these_pairs_once(name: str, ranks: int) -> None:
    case = CASES[name]
    own, parents = np.array(case.lengths), np.array(case.parents)
    capacities = even_capacities(int(own.sum()), ranks)
    config = ScheduleConfig(0.05, SHAPE, block=32)
    if case.mask.attention_chunk is not None:
        plan = make_scheduler("tiles", config).plan(own, capacities, case.mask)
    else:
        paths = Paths.of(own, parents, np.full(len(own), case.two_way))
        plan = TilesScheduler(config).plan(paths.lengths, capacities, case.mask, *paths.family)
    validate_plan(plan)
    np.testing.assert_array_equal(met(plan), seen(case))
