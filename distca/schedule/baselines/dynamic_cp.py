"""The baseline to come in Megatron-LM: dynamic context parallelism, by its rules written out.

With `--dynamic-context-parallel --max-seqlen-per-dp-cp-rank N` Megatron-LM packs documents into
micro-batches. In each the data- and context-parallel ranks are divided into neighbouring groups, a
power of two of ranks each (or all of them). A group packs its documents and divides each among its
ranks. Ranks wait only for those of their group, and pipelines run as always.

No release has it (0.19.2 does not). The rules below are those of `next_hdp_group_packing_aware` and
`DefaultDynamicCPScheduler` on Megatron-LM's branch dev, commit d48bd6be, which is 0.19.0:

1. Documents go from the longest to the shortest; the first opens a group of the fewest ranks that
   hold it. A document's work is the square of its length, divided by the ranks of its group.
2. Each further document goes where the busiest rank's work is least afterwards: to a group, whose
   ranks must not get more than N tokens, or to free ranks. Of equal places it takes the one with
   the fewest ranks, and groups before free ranks. No rank gets more than 1.05 times N times the
   micro-batch's longest document. What finds no place waits for the next micro-batch.
3. While ranks are free, the first of the smallest groups is doubled. Where no group can grow, all
   ranks become one group with what fits, from the longest document on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2

import numpy as np

from distca.plan.span import Int64s
from distca.schedule.baselines.rounds import Round, RoundScheduler

_CAP = 1.05
"""Bound on a rank's work, over `most tokens x longest document`."""


class DynamicContextParallel(RoundScheduler):
    """Megatron-LM's dynamic context parallelism, as the module describes it."""

    name = "dynamic-cp"
    waits_for_all = False

    def rounds(self, lengths: Int64s, ranks: int, most_tokens: int) -> list[Round]:
        """Makes the micro-batches, as `RoundScheduler.rounds` says.

        Raises:
            ValueError: ranks are odd, too few for the longest document, or Megatron-LM fails.
        """
        if ranks % 2:
            raise ValueError(
                f"Megatron's dynamic context parallelism needs an even number of ranks, not {ranks}"
            )
        longest = int(lengths.max(initial=1))
        if (needed := _ranks_for(longest, most_tokens)) > ranks:
            raise ValueError(
                f"dynamic-cp: a document of {longest:,} tokens needs {needed} ranks with at most "
                f"{most_tokens:,} each, but there are {ranks}"
            )
        left = sorted(range(len(lengths)), key=lambda n: -int(lengths[n]))
        tokens = lengths.tolist()
        found = []
        while left:
            groups, left = _micro_batch(left, tokens, ranks, most_tokens)
            found.append([list(g.documents) for g in groups for _ in range(g.size)])
        return found


@dataclass
class _Group:
    """Neighbouring ranks that share documents.

    Attributes:
        size: number of ranks.
        documents: its documents, in the order in which they came.
        tokens: tokens of each rank, no whole number.
        work: work of each rank.
    """

    size: int
    documents: list[int] = field(default_factory=list)
    tokens: float = 0.0
    work: float = 0.0

    def add(self, document: int, tokens: int) -> None:
        self.documents.append(document)
        self.tokens += tokens / self.size
        self.work += tokens * tokens / self.size


def _ranks_for(tokens: int, most_tokens: int) -> int:
    """Returns the power of two of ranks that hold a document."""
    return int(max(1, 2 ** ceil(log2(tokens / most_tokens))))


def _micro_batch(
    left: list[int], tokens: list[int], ranks: int, most_tokens: int
) -> tuple[list[_Group], list[int]]:
    """Returns the groups of a micro-batch, in the order of their ranks, and what is left.

    Args:
        left: documents, from the longest to the shortest.
        tokens: tokens of each document.
        ranks: number of ranks.
        most_tokens: most tokens on a rank.

    Raises:
        ValueError: Megatron-LM fails.
    """
    first, *others = left
    cap = float(tokens[first]) * float(most_tokens) * _CAP
    groups = [_Group(_ranks_for(tokens[first], most_tokens))]
    groups[0].add(first, tokens[first])
    busiest, free, later = groups[0].work, ranks - groups[0].size, []
    for document in others:
        place = _best_place(groups, tokens[document], busiest, free, cap, most_tokens, ranks)
        if place is None:
            later.append(document)
            continue
        if isinstance(place, int):
            free -= place
            place = _Group(place)
            groups.append(place)
        place.add(document, tokens[document])
        busiest = max(busiest, place.work)
    if not _fill(groups, ranks):
        return _all_together(left, tokens, ranks, most_tokens)
    return groups, later


def _best_place(
    groups: list[_Group],
    tokens: int,
    busiest: float,
    free: int,
    cap: float,
    most_tokens: int,
    ranks: int,
) -> _Group | int | None:
    """Returns the group that takes a document, the size of a new one, or None: no place does."""
    least, found = np.inf, None
    size = _ranks_for(tokens, most_tokens)
    while size <= ranks:
        work = tokens * tokens / size
        places: list[tuple[float, _Group | int]] = [
            (group.work, group)
            for group in groups
            if group.size == size and group.tokens + tokens / size <= most_tokens
        ]
        if free >= size:
            places.append((0.0, size))
        for before, place in places:
            after = max(busiest, before + work)
            if after <= cap and after < least:
                least, found = after, place
        size *= 2
    return found


def _fill(groups: list[_Group], ranks: int) -> bool:
    """Doubles groups until no rank is free; returns False where none can grow.

    Raises:
        ValueError: a group grows beyond the last rank, where Megatron-LM fails.
    """
    while (used := sum(group.size for group in groups)) < ranks:
        smallest = min(group.size for group in groups)
        wanted, end = min(2 * smallest, ranks), 0
        for group in groups:
            end += group.size
            if group.size == smallest and end + wanted - smallest <= ranks:
                break
        else:
            return False
        if used + wanted - smallest > ranks:
            raise ValueError(
                f"dynamic-cp: Megatron-LM's scheduler fails for {ranks} ranks, which are not a "
                "power of two: it moves a group beyond the last rank"
            )
        # Tokens and work count no more.
        group.size = wanted
    return True


def _all_together(
    left: list[int], tokens: list[int], ranks: int, most_tokens: int
) -> tuple[list[_Group], list[int]]:
    """Returns one group of all ranks with what fits, and what is left."""
    together, later = _Group(ranks), []
    for document in left:
        if together.tokens + tokens[document] / ranks <= most_tokens:
            together.add(document, tokens[document])
        else:
            later.append(document)
    return [together], later
