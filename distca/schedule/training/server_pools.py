"""Server pools: neighbouring ranks that share attention among themselves alone.

Ranks wait for each other in every layer only where tasks travel between them. Without a pipeline
nothing needs all ranks to be equally busy in each layer: it is enough if an iteration takes them
equally long, since then they reach the reduction of gradients together. So the documents of a
global batch are assigned to pools by all their work, that of attention and that of linear layers,
and tasks travel only inside a pool. A pool with long documents has fewer tokens than others.

Pools of one rank are data parallelism whose replicas have equal work. Smaller pools send fewer
bytes and wait less, but they need documents that can be divided evenly among them. One pool of all
ranks shares attention as DistCA without pools does.

A pool's micro-batches have about equally many tokens, and any number of them: memory alone bounds
it. A document longer than these has a micro-batch alone.

Long documents may be shared by all ranks instead, in *wide* micro-batches, which come first. Then
short documents stay in small pools, and the work of a long one need not fit in the share of a pool.

A pool's tokens must divide evenly among its ranks (and nano-batches, and sequence parallelism), so
each micro-batch ends with a *padding* document of a few tokens, which no loss counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan.span import Floats, Int64s
from distca.schedule.training.nano_batches import NanoPlan, SplitDocument
from distca.schedule.training.planned_batch import PADDING, Documents, PlannedMicroBatch
from distca.schedule.training.shared_ticks import side_by_side


@dataclass(frozen=True)
class ServerPools:
    """A division of the data-parallel ranks of one stage into pools of neighbours.

    Attributes:
        size: ranks of a pool.
        number: number of pools.
        multiple: number that divides the tokens of a pool's micro-batch.
        wide_documents: tokens from which on all ranks share a document; None: pools have all.
    """

    size: int
    number: int
    multiple: int
    wide_documents: int | None = None

    def assign(
        self, incoming: Sequence[Documents], work: Floats, speeds: Floats
    ) -> list[list[Documents]]:
        """Assigns the documents of a global batch to the pools' micro-batches.

        Args:
            incoming: documents of each micro-batch, in the order of the stream.
            work: work of each of these documents, of all micro-batches in turn, `[documents]`.
            speeds: relative speed of each rank, `[ranks]`.

        Returns:
            For each micro-batch the documents of each pool, with padding at their end; of a wide
            one the documents that all ranks share, alone.
        """
        lengths = np.concatenate([documents.lengths for documents in incoming])
        starts = np.concatenate([documents.starts for documents in incoming])
        wide = self._wide(lengths, len(incoming))
        parts: list[list[Documents]] = []
        for number in range(wide.max(initial=-1) + 1):
            members = np.flatnonzero(wide == number)
            multiple = self.number * self.multiple
            parts.append([_padded(lengths[members], starts[members], multiple)])
        of_pools = speeds.reshape(self.number, self.size).sum(axis=1)
        narrow, count = np.flatnonzero(wide < 0), len(incoming) - len(parts)
        pool = _evenly(work[narrow], of_pools)
        parts += [[] for _ in range(count)]
        for number in range(self.number if count else 0):
            mine = narrow[pool == number]
            # A pool's micro-batches follow each other. Their tokens are what memory depends on.
            micro_batch = _evenly(lengths[mine].astype(np.float64), np.ones(count))
            for each, found in enumerate(parts[-count:]):
                members = mine[micro_batch == each]
                found.append(_padded(lengths[members], starts[members], self.multiple))
        return parts

    def _wide(self, lengths: Int64s, micro_batches: int) -> Int64s:
        """Assigns long documents to wide micro-batches, about as many as their part of all tokens.

        Returns:
            The wide micro-batch of each document, int64 `[documents]`; -1: pools have it.
        """
        chosen = np.full(len(lengths), -1, dtype=np.int64)
        if self.wide_documents is None:
            return chosen
        long = np.flatnonzero(lengths >= self.wide_documents)
        tokens = lengths[long].astype(np.float64)
        if not len(long):
            return chosen
        if len(long) == len(lengths) or micro_batches == 1:
            count = micro_batches
        else:
            share = float(tokens.sum() / lengths.sum())
            count = min(max(round(share * micro_batches), 1), micro_batches - 1)
        # No more than there are documents, and all documents if there is one micro-batch.
        every = np.arange(len(lengths)) if micro_batches == 1 else long
        weights = lengths[every].astype(np.float64)
        chosen[every] = _evenly(weights, np.ones(min(count, len(every))))
        return chosen

    def ranks(self) -> Int64s:
        """Returns the ranks of each pool, `[pools, ranks of a pool]`."""
        return np.arange(self.number * self.size, dtype=np.int64).reshape(self.number, self.size)

    def join(self, parts: Sequence[PlannedMicroBatch]) -> PlannedMicroBatch:
        """Joins the micro-batches of all pools, each planned over its own ranks.

        Args:
            parts: micro-batch of each pool.
        """
        documents = tuple(
            Documents(
                np.concatenate([each.lengths for each in of_pools]),
                np.concatenate([each.starts for each in of_pools]),
            )
            for of_pools in zip(*(part.documents for part in parts), strict=True)
        )
        return PlannedMicroBatch(
            documents,
            self._join_plans([part.plans for part in parts]),
            parts[0].chain,
            tuple(
                self._join_plans(of_mask)
                for of_mask in zip(*(part.others for part in parts), strict=True)
            ),
            tuple(parts),
        )

    def _join_plans(self, plans: Sequence[Sequence[NanoPlan]]) -> tuple[NanoPlan, ...]:
        """Joins the plans of all pools' nano-batches, `[pools][nano-batches]`."""
        return tuple(self._join_nano(of_pools) for of_pools in zip(*plans, strict=True))

    def _join_nano(self, nano_plans: Sequence[NanoPlan]) -> NanoPlan:
        ranks, world_size = self.ranks(), self.number * self.size
        split_documents, first = [], 0
        for nano, mine in zip(nano_plans, ranks, strict=True):
            for split in nano.split_documents:
                earlier = split.earlier
                earlier = replace(earlier, rank=mine[earlier.rank], world_size=world_size)
                split_documents.append(SplitDocument(first + split.document, earlier))
            first += len(nano.plan.lengths)
        return NanoPlan(
            side_by_side([nano.plan for nano in nano_plans], ranks, world_size),
            tuple(split_documents),
            borrows_from_ping=any(nano.borrows_from_ping for nano in nano_plans),
        )


def _padded(lengths: Int64s, starts: Int64s, multiple: int) -> Documents:
    """Returns documents with padding, so that a number divides their tokens."""
    tokens = int(lengths.sum())
    missing = -tokens % multiple if tokens else multiple
    if not missing:
        return Documents(lengths, starts)
    return Documents(np.append(lengths, missing), np.append(starts, PADDING))


def _evenly(weights: Floats, speeds: Floats) -> Int64s:
    """Assigns documents to groups, the heaviest first, each to the group that is done first.

    Args:
        weights: weight of each document, `[documents]`.
        speeds: relative speed of each group, `[groups]`.

    Returns:
        The group of each document, int64 `[documents]`.
    """
    chosen = np.zeros(len(weights), dtype=np.int64)
    done = [(0.0, group) for group in range(len(speeds))]
    for document in np.lexsort((np.arange(len(weights)), -weights)).tolist():
        until, group = done[0]
        heapq.heapreplace(done, (until + float(weights[document]) / float(speeds[group]), group))
        chosen[document] = group
    return chosen
