"""Chunks of a prompt and their ranks: Algorithms 1 to 3 of Tetris, with Eq. 2.

    plan_prefill(times, queued, ranks_per_node=8, tokens=100_000, improvement_rate=0.2)

A prompt that must wait for many ranks is begun on fewer of them that are free now: its first chunk
has as many tokens as fill the time until the others are free. Groups grow from chunk to chunk and
are nested, so that keys and values only ever move to new members.

The search is the paper's. What it leaves open is decided so: a chunk is too short below
`smallest_chunk` tokens; one that would take the whole rest of the prompt is no chunk, since
Algorithm 2 has weighed that group for all of it; of equal times the first found stays.

What is computed are `Piece`s: chunks cut between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from distca.schedule.serving.cdsp.groups import Groups, Ranks
from distca.schedule.serving.cdsp.latency import PrefillTimes

NOBODY: Ranks = frozenset()


@dataclass(frozen=True)
class Chunk:
    """Part of a prompt with ranks of its own.

    Attributes:
        cached: tokens before it.
        tokens: its new tokens.
        ranks: members of its group, those of earlier chunks among them.
        start: seconds from now until all of them are free for it.
        seconds: time that it takes then.
    """

    cached: int
    tokens: int
    ranks: Ranks
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """Seconds from now until it is done."""
        return self.start + self.seconds


@dataclass(frozen=True)
class PrefillPlan:
    """Chunks of a prompt, in their order."""

    chunks: tuple[Chunk, ...]

    @property
    def ttft(self) -> float:
        """Seconds from now until the first token."""
        return self.chunks[-1].end


@dataclass(frozen=True)
class Search:
    """What a search for chunks is based on.

    Attributes:
        times: seconds of a prefill.
        improvement_rate: part of the time to the first token that a larger group must save, from 0
            to below 1. Under load a high one leaves ranks to others.
        most_ranks: most ranks of a group, unless a prompt or the holders of its prefix need more.
        chunked: whether prompts are cut at all; otherwise Algorithm 2 alone decides.
        smallest_chunk: fewest tokens of a chunk before the last one.
        tokens_per_rank: tokens whose keys and values, and activations, a rank can hold.

    Raises:
        ValueError: a value is out of range.
    """

    times: PrefillTimes
    improvement_rate: float = 0.0
    most_ranks: float = float("inf")
    chunked: bool = True
    smallest_chunk: int = 128
    tokens_per_rank: float = float("inf")

    def __post_init__(self) -> None:
        if not 0 <= self.improvement_rate < 1:
            raise ValueError(
                f"improvement rate {self.improvement_rate} must be from 0 to below 1, as 0.2"
            )
        if self.smallest_chunk < 1:
            raise ValueError(f"smallest chunk {self.smallest_chunk} must be at least 1 token")


def plan_prefill(
    search: Search,
    queued: Sequence[float],
    ranks_per_node: int,
    tokens: int,
    cached: int = 0,
    holders: Ranks = NOBODY,
) -> PrefillPlan:
    """Chooses chunks and their ranks for one prompt (`CDSPSchedule`).

    A prefix that is cached is used where its holders are free soon enough, else computed again.

    Args:
        search: times and thresholds.
        queued: seconds until each rank has done what it was given.
        ranks_per_node: rank `r` is on node `r // ranks_per_node`.
        tokens: new tokens, at least 1.
        cached: tokens before them that are cached already.
        holders: ranks that hold those; all of them join every chunk.

    Raises:
        ValueError: no group of ranks can hold the prompt.
    """
    groups = Groups(queued, ranks_per_node)
    plan = None
    if cached:
        # As many holders as are no degree are joined by others to the next one.
        plan = _plan(search, groups, tokens, cached, holders)
    fresh = _plan(search, groups, cached + tokens, 0, NOBODY)
    if plan is None or (fresh is not None and fresh.ttft < plan.ttft):
        plan = fresh
    if plan is None:
        raise ValueError(
            f"a prompt of {cached + tokens} tokens does not fit: {len(queued)} ranks hold "
            f"{search.tokens_per_rank:.0f} tokens each, in groups of "
            f"{', '.join(map(str, search.times.degrees))}"
        )
    return plan


def _plan(
    search: Search, groups: Groups, tokens: int, cached: int, holders: Ranks
) -> PrefillPlan | None:
    degrees = [s for s in search.times.degrees if s <= len(groups.everyone)]
    planner = _Planner(search, groups)
    for candidates in ([s for s in degrees if s <= search.most_ranks], degrees):
        chunks = planner.plan(tokens, cached, holders, candidates, groups.everyone, 0.0)
        if chunks is not None:
            return PrefillPlan(chunks)
    return None


class _Planner:
    """The recursion of Algorithm 1 for one prompt."""

    def __init__(self, search: Search, groups: Groups) -> None:
        self._search, self._groups = search, groups

    def plan(
        self,
        tokens: int,
        cached: int,
        group: Ranks,
        degrees: Sequence[int],
        pool: Ranks,
        elapsed: float,
    ) -> tuple[Chunk, ...] | None:
        """Plans the rest of a prompt: Algorithm 1.

        Args:
            tokens: those that are in no chunk yet.
            cached: those that are, or were cached.
            group: ranks of the chunks before.
            degrees: sizes that the next chunks may have, ascending.
            pool: ranks that they may have.
            elapsed: seconds until the chunks before are done. Eq. 2: what a rank is queued for is
                less by so much, and at least 0.
        """
        last = self._single(tokens, cached, group, degrees, pool, elapsed)
        if last is None:
            return None
        best: tuple[Chunk, ...] = (last,)
        if not self._search.chunked:
            return best
        pool = last.ranks
        smaller = [s for s in degrees if len(group) <= s <= len(pool)]
        for number, degree in enumerate(smaller):
            for place in range(number + 1, len(smaller)):
                chunk = self._chunk(tokens, cached, group, degree, smaller[place], pool, elapsed)
                if chunk is None:
                    continue
                rest = self.plan(
                    tokens - chunk.tokens,
                    cached + chunk.tokens,
                    chunk.ranks,
                    smaller[place:],
                    pool,
                    chunk.end,
                )
                if rest is not None and rest[-1].end < best[-1].end:
                    best = (chunk, *rest)
        return best

    def _single(
        self,
        tokens: int,
        cached: int,
        group: Ranks,
        degrees: Sequence[int],
        pool: Ranks,
        elapsed: float,
    ) -> Chunk | None:
        """Gives all tokens to one group: Algorithm 2."""
        best, least = None, float("inf")
        for degree in degrees:
            if degree < len(group) or cached + tokens > degree * self._search.tokens_per_rank:
                continue
            ranks = self._groups.extend(pool, group, degree)
            start = max(self._groups.latest(ranks), elapsed)
            seconds = self._search.times.seconds(degree, cached, tokens)
            ttft = start + seconds - elapsed
            if ttft < least * (1 - self._search.improvement_rate):
                best, least = Chunk(cached, tokens, ranks, start, seconds), ttft
        return best

    def _chunk(
        self,
        tokens: int,
        cached: int,
        group: Ranks,
        degree: int,
        next_degree: int,
        pool: Ranks,
        elapsed: float,
    ) -> Chunk | None:
        """Cuts a chunk that ends when the next one's ranks are free: Algorithm 3."""
        ranks = self._groups.extend(pool, group, degree)
        later = self._groups.extend(pool, ranks, next_degree)
        start = max(self._groups.latest(ranks), elapsed)
        budget = self._groups.latest(later) - start
        fitting = self._search.times.tokens_within(degree, cached, budget)
        if not self._search.smallest_chunk <= fitting < tokens:
            return None
        if cached + fitting > degree * self._search.tokens_per_rank:
            return None
        seconds = self._search.times.seconds(degree, cached, fitting)
        return Chunk(cached, fitting, ranks, start, seconds)


class Piece(NamedTuple):
    """A chunk as it is computed: positions `[start, end)` on these ranks."""

    start: int
    end: int
    ranks: Ranks


def cut_at_blocks(chunks: Sequence[Chunk], block_size: int) -> list[Piece]:
    """Moves the ends of all chunks but the last one to ends of blocks; none may be left of one.

    What is cached before the first one are whole blocks.
    """
    last = chunks[-1]
    ends = [(each.cached + each.tokens) // block_size * block_size for each in chunks]
    edges = [chunks[0].cached, *ends[:-1], last.cached + last.tokens]
    pieces = zip(pairwise(edges), chunks, strict=True)
    return [Piece(*edge, chunk.ranks) for edge, chunk in pieces if edge[1] > edge[0]]
