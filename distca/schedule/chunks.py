"""Chunked local attention, planned as if each chunk of a document were a document.

Queries see the earlier keys of their own chunk alone, so that plans of chunks have causal tasks,
which any scheduler balances and any kernel runs, and none reaches over a chunk's edge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.plan import Mask, Placement, Plan
from distca.plan.span import Int64s, expand_ranges
from distca.schedule.base import Scheduler
from distca.schedule.tiles.scheduler import TilesScheduler


@dataclass(frozen=True)
class OverChunks:
    """A scheduler that also plans masks of chunks.

    Attributes:
        scheduler: scheduler of causal documents, and of any other mask.
    """

    scheduler: Scheduler

    def plan(self, lengths: Int64s, capacities: Int64s, mask: Mask) -> Plan:
        """Makes a plan as `Scheduler.plan` says; chunks are placed one by one.

        Raises:
            ValueError: a chunk ends within a kernel's block.
        """
        if mask.attention_chunk is None:
            return self.scheduler.plan(lengths, capacities, mask)
        chunks = _Chunks.of(lengths, mask.attention_chunk)
        plan = self.scheduler.plan(chunks.lengths, capacities, Mask())
        return chunks.whole(plan, lengths, chunks.placed(plan.placement), mask)

    def schedule(
        self,
        lengths: Int64s,
        placement: Placement,
        mask: Mask,
        parents: Int64s | None = None,
        prefix: Int64s | None = None,
        query_shift: Int64s | None = None,
    ) -> Plan:
        """Makes a plan as `Scheduler.schedule` says.

        Args:
            lengths: tokens of each document, with those of its parent, int64 `[documents]`.
            placement: ranks that own the tokens.
            mask: attention mask of all documents.
            parents: see `Plan.parents`, for tiles alone; None: no document has any.
            prefix: see `TilesScheduler.plan`.
            query_shift: see `Plan.query_shift`.

        Raises:
            ValueError: a chunk ends within a kernel's block.
        """
        if parents is not None:
            assert isinstance(self.scheduler, TilesScheduler)
            assert mask.attention_chunk is None
            return self.scheduler.schedule(lengths, placement, mask, parents, prefix, query_shift)
        if mask.attention_chunk is None:
            return self.scheduler.schedule(lengths, placement, mask)
        chunks = _Chunks.of(lengths, mask.attention_chunk)
        plan = self.scheduler.schedule(chunks.lengths, chunks.cut(placement), Mask())
        return chunks.whole(plan, lengths, placement, mask)


@dataclass(frozen=True)
class _Chunks:
    """The chunks of documents, in turn.

    Attributes:
        size: tokens of a chunk; a document's last may have fewer.
        document: document of each, int64 `[chunks]`.
        start: first token of each in its document, likewise.
        lengths: tokens of each, likewise.
        first: number of each document's first chunk, int64 `[documents]`.
    """

    size: int
    document: Int64s
    start: Int64s
    lengths: Int64s
    first: Int64s

    @staticmethod
    def of(lengths: Int64s, size: int) -> _Chunks:
        counts = -(-np.asarray(lengths, dtype=np.int64) // size)
        document = np.repeat(np.arange(len(counts)), counts)
        start = expand_ranges(np.zeros_like(counts), counts) * size
        own = np.minimum(lengths[document] - start, size)
        return _Chunks(size, document, start, own, np.cumsum(counts) - counts)

    def cut(self, placement: Placement) -> Placement:
        """Returns a placement of the documents as one of the chunks."""
        cut = placement.cut_every(self.size)
        chunk = cut.start // self.size
        moved = chunk * self.size
        return replace(
            cut,
            document=self.first[cut.document] + chunk,
            start=cut.start - moved,
            end=cut.end - moved,
        )

    def placed(self, placement: Placement) -> Placement:
        """Returns a placement of the chunks as one of the documents."""
        moved = self.start[placement.document]
        whole = replace(
            placement,
            document=self.document[placement.document],
            start=placement.start + moved,
            end=placement.end + moved,
        )
        return whole.joined()

    def whole(self, plan: Plan, lengths: Int64s, placement: Placement, mask: Mask) -> Plan:
        """Returns a plan of the chunks as one of the documents, with a placement of these."""
        if self.size % plan.block:
            raise ValueError(
                f"chunks of {self.size} tokens end within a block of {plan.block}: give a multiple"
            )
        tasks = plan.tasks
        moved = self.start[tasks.document]
        return replace(
            plan,
            lengths=np.asarray(lengths, dtype=np.int64),
            placement=placement,
            mask=mask,
            tasks=replace(
                tasks,
                document=self.document[tasks.document],
                q_start=tasks.q_start + moved,
                q_end=tasks.q_end + moved,
                kv_start=tasks.kv_start + moved,
                kv_end=tasks.kv_end + moved,
            ),
        )
