"""Random batches of documents for schedulers, and what every plan of them must fulfil."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from distca.plan import Plan
from distca.plan.span import Int64s


@dataclass(frozen=True)
class SlowStart:
    """A cost model in which a task costs as much as `start` pairs before its first pair."""

    start: int = 3000
    description: str = "for tests"

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> np.ndarray:
        return (pairs + self.start) * 1e-9


@st.composite
def documents(
    draw: st.DrawFn, most_ranks: int = 16, most_tokens: int = 700
) -> tuple[Int64s, Int64s]:
    """Lengths that fill ranks, and the ranks' capacities.

    One-token, odd, multiple-of-block and giant documents in any order; often more ranks than
    documents, and not always as many tokens as ranks divide.
    """
    world_size, tokens = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_tokens))
    left, lengths = world_size * tokens + draw(st.integers(0, world_size - 1)), []
    capacities = np.full(world_size, left // world_size) + (
        np.arange(world_size) < left % world_size
    )
    kinds = st.sampled_from(["one", "odd", "block", "any", "all"])
    while left:
        if len(lengths) > 40:
            lengths.append(left)
            break
        kind = draw(kinds)
        length = {
            "one": lambda: 1,
            "odd": lambda: 2 * draw(st.integers(0, 200)) + 1,
            "block": lambda: 128 * draw(st.integers(1, 4)),
            "any": lambda limit=left: draw(st.integers(1, limit)),
            "all": lambda limit=left: limit,
        }[kind]()
        lengths.append(min(length, left))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64), capacities


def long_tailed_lengths(seed: int, total: int, median: int, longest: int) -> Int64s:
    """Lognormal lengths that sum up to `total`."""
    rng = np.random.default_rng(seed)
    left, lengths = total, []
    while left:
        length = int(min(max(rng.lognormal(np.log(median), 1.5), 1), longest, left))
        lengths.append(length)
        left -= length
    return np.array(lengths, dtype=np.int64)


def task_rows(plan: Plan) -> list[tuple[int, ...]]:
    t = plan.tasks
    columns = (t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, t.server)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def placement_rows(plan: Plan) -> list[tuple[int, ...]]:
    at = plan.placement
    columns = (at.document, at.start, at.end, at.rank)
    return list(zip(*(column.tolist() for column in columns), strict=True))
