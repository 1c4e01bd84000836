"""Ways to give a prompt its ranks: CDSP, its parts, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from distca.schedule.serving.cdsp.chunks import Chunk, PrefillPlan, Search, plan_prefill

Strategy = Callable[[Search, Sequence[float], int, int], PrefillPlan]
"""Plans a prompt by a search, seconds until each rank is free, ranks of a node, and tokens."""


def fixed(
    degree: int, search: Search, queued: Sequence[float], ranks_per_node: int, tokens: int
) -> PrefillPlan:
    """Gives the prompt to the group of `degree` consecutive ranks that is free first.

    Raises:
        ValueError: there are no such groups, or they don't hold the prompt.
    """
    if degree > len(queued) or len(queued) % degree:
        raise ValueError(f"{len(queued)} ranks are no groups of {degree}: give a multiple of it")
    if degree not in search.times.degrees:
        raise ValueError(f"prefills on {degree} ranks were not measured: choose another number")
    if tokens > degree * search.tokens_per_rank:
        raise ValueError(f"a prompt of {tokens} tokens does not fit on {degree} ranks")
    starts = [max(queued[first : first + degree]) for first in range(0, len(queued), degree)]
    group = min(range(len(starts)), key=starts.__getitem__)
    seconds = search.times.seconds(degree, 0, tokens)
    ranks = frozenset(range(group * degree, (group + 1) * degree))
    return PrefillPlan((Chunk(0, tokens, ranks, starts[group], seconds),))


def greedy(
    search: Search, queued: Sequence[float], ranks_per_node: int, tokens: int
) -> PrefillPlan:
    """Gives the prompt the one group of any size by which it is done first, as LoongServe does."""
    return plan_prefill(
        replace(search, improvement_rate=0.0, chunked=False), queued, ranks_per_node, tokens
    )


def single_chunk(
    search: Search, queued: Sequence[float], ranks_per_node: int, tokens: int
) -> PrefillPlan:
    """Gives the prompt one group, a larger one where it improves enough: Algorithm 2."""
    return plan_prefill(replace(search, chunked=False), queued, ranks_per_node, tokens)


def cdsp(search: Search, queued: Sequence[float], ranks_per_node: int, tokens: int) -> PrefillPlan:
    """Gives the prompt chunks on growing groups: Algorithm 1."""
    return plan_prefill(search, queued, ranks_per_node, tokens)


PREFILL_STRATEGIES: dict[str, Strategy] = {
    "fixed-8": partial(fixed, 8),
    "fixed-16": partial(fixed, 16),
    "greedy": greedy,
    "single-chunk": single_chunk,
    "cdsp": cdsp,
}
"""What is compared, by name."""

LOAD_AWARE = ("single-chunk", "cdsp")
"""Those that go by an improvement rate."""


def strategy_of(name: str) -> Strategy:
    """Returns a strategy by its name; `fixed-N` is one for each power of two.

    Raises:
        ValueError: there is none of that name.
    """
    if name in PREFILL_STRATEGIES:
        return PREFILL_STRATEGIES[name]
    degree = name.removeprefix("fixed-")
    if degree == name or not degree.isdecimal():
        known = ", ".join(("fixed-N", *(each for each in PREFILL_STRATEGIES if "-" not in each)))
        raise ValueError(f"no strategy {name!r}: choose from {known}, single-chunk")
    if int(degree) < 1 or int(degree) & (int(degree) - 1):
        raise ValueError(f"{name}: {degree} ranks are no power of two: give 1, 2, 4, ...")
    return partial(fixed, int(degree))
