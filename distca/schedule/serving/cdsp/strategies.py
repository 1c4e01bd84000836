"""Ways to give a prompt its ranks: CDSP, its parts, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from distca.schedule.serving.cdsp.chunks import NOBODY, Chunk, PrefillPlan, Search, plan_prefill
from distca.schedule.serving.cdsp.groups import Ranks


class GroupStrategy(Protocol):
    """What gives a prompt its ranks."""

    def __call__(
        self,
        search: Search,
        queued: Sequence[float],
        ranks_per_node: int,
        tokens: int,
        cached: int = 0,
        holders: Ranks = NOBODY,
        /,
    ) -> PrefillPlan:
        """Plans a prompt, as `plan_prefill`."""
        ...


def fixed(
    degree: int,
    search: Search,
    queued: Sequence[float],
    ranks_per_node: int,
    tokens: int,
    cached: int = 0,
    holders: Ranks = NOBODY,
) -> PrefillPlan:
    """Gives the prompt to the group of `degree` consecutive ranks that is free first.

    A prefix that others hold is computed again.

    Raises:
        ValueError: there are no such groups, or they don't hold the prompt.
    """
    if degree > len(queued) or len(queued) % degree:
        raise ValueError(f"{len(queued)} ranks cannot form groups of {degree}: give a multiple")
    if degree not in search.times.degrees:
        raise ValueError(f"prefills on {degree} ranks were not measured: choose another number")
    if cached + tokens > degree * search.tokens_per_rank:
        raise ValueError(f"a prompt of {cached + tokens} tokens does not fit on {degree} ranks")
    starts = [max(queued[first : first + degree]) for first in range(0, len(queued), degree)]
    group = min(range(len(starts)), key=starts.__getitem__)
    ranks = frozenset(range(group * degree, (group + 1) * degree))
    if not holders <= ranks:
        cached, tokens = 0, cached + tokens
    seconds = search.times.seconds(degree, cached, tokens)
    return PrefillPlan((Chunk(cached, tokens, ranks, starts[group], seconds),))


def greedy(
    search: Search,
    queued: Sequence[float],
    ranks_per_node: int,
    tokens: int,
    cached: int = 0,
    holders: Ranks = NOBODY,
) -> PrefillPlan:
    """Gives the prompt the one group of any size by which it is done first, as LoongServe does."""
    search = replace(search, improvement_rate=0.0, chunked=False)
    return plan_prefill(search, queued, ranks_per_node, tokens, cached, holders)


def single_chunk(
    search: Search,
    queued: Sequence[float],
    ranks_per_node: int,
    tokens: int,
    cached: int = 0,
    holders: Ranks = NOBODY,
) -> PrefillPlan:
    """Gives the prompt one group, a larger one where it improves enough: Algorithm 2."""
    search = replace(search, chunked=False)
    return plan_prefill(search, queued, ranks_per_node, tokens, cached, holders)


PREFILL_STRATEGIES: dict[str, GroupStrategy] = {
    "fixed-8": partial(fixed, 8),
    "fixed-16": partial(fixed, 16),
    "greedy": greedy,
    "single-chunk": single_chunk,
    "cdsp": plan_prefill,
}
"""What is compared, by name."""

LOAD_AWARE = ("single-chunk", "cdsp")
"""Strategies that depend on an improvement rate."""


def strategy_of(name: str) -> GroupStrategy:
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
        raise ValueError(f"{name}: {degree} ranks are not a power of two: give 1, 2, 4, ...")
    return partial(fixed, int(degree))
