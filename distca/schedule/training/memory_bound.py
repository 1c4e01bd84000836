"""Micro-batches of server pools whose number memory bounds.

The documents of a global batch are shared out over as many micro-batches as the job's flags say,
and over more where one would not fit. Documents stay whole, so the longest one decides what is
possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan import BLOCK
from distca.plan.span import Int64s
from distca.schedule.training.global_batch import GlobalBatchPlanner
from distca.schedule.training.peak_memory import StepMemory
from distca.schedule.training.planned_batch import (
    PADDING,
    Documents,
    PlannedGlobalBatch,
    documents_in_turn,
)


@dataclass(frozen=True)
class MemoryBound:
    """Most memory that a training step takes on a GPU.

    Attributes:
        nbytes: the bound, of the model's state, activations and buffers together.
        step: memory of a step.
        limit: what sets the bound, as messages name it.
    """

    nbytes: float
    step: StepMemory
    limit: str

    def plan(
        self, planner: GlobalBatchPlanner, incoming: Sequence[Documents]
    ) -> tuple[PlannedGlobalBatch, float]:
        """Plans a global batch with as few micro-batches as fit, at least those that are given.

        Args:
            planner: planner of a job with server pools.
            incoming: documents of each micro-batch, as for `GlobalBatchPlanner.plan`.

        Returns:
            The plans, and the peak bytes of the GPU that needs most. These exceed the bound only if
            no number of micro-batches is enough.
        """
        every = _joined(incoming)
        count, most = len(incoming), len(every.lengths)
        found: tuple[PlannedGlobalBatch, float] | None = None
        while True:
            parts = planner.assign(incoming)
            needed = self._least(planner, parts)
            last = count >= most or (planner.stages == 1 and _is_one_document(parts))
            if needed <= self.nbytes or last:
                planned = planner.plan_assigned(parts)
                needed = float(self.step.peak(planned).max())
                if found is None or needed < found[1]:
                    found = planned, needed
                if needed <= self.nbytes or last:
                    return found
            count = min(self._more(planner, needed, count), most)
            incoming = every.in_parts(count)

    def check(self, planner: GlobalBatchPlanner, lengths: Int64s) -> None:
        """Checks that each document fits alone in a micro-batch.

        Args:
            planner: planner of a job with server pools.
            lengths: tokens of each document, `[documents]`.

        Raises:
            ValueError: the longest one does not; the message says what to do.
        """
        needed = self.needed_alone(planner, lengths)
        if needed <= self.nbytes:
            return
        longest = int(lengths.max())
        state = max(self.step.state_bytes(*planner.servers.shape))
        room, of_document = self.nbytes - state, needed - state
        shorter = int(longest * max(room, 0.0) / of_document) // BLOCK * BLOCK
        remedy = "share the model among more GPUs (--tensor-model-parallel-size)"
        if shorter > 0:
            remedy = (
                f"cut documents at about {shorter:,} tokens (--distca-max-document-length), share "
                "them among more ranks (--distca-pool-size, --distca-wide-documents, "
                "--tensor-model-parallel-size) or recompute (--recompute-granularity full)"
            )
        raise ValueError(
            f"the longest document, of {longest:,} tokens, needs {needed / 1e9:,.1f} GB of a GPU "
            f"alone in a micro-batch, {state / 1e9:,.1f} GB of them for the model's state, but "
            f"{self.limit} allows {self.nbytes / 1e9:,.1f} GB: {remedy}, or raise "
            "--distca-memory-gb"
        )

    def needed_alone(self, planner: GlobalBatchPlanner, lengths: Int64s) -> float:
        """Returns the peak bytes of the longest document alone, after the longest of a pool if all
        ranks share it.

        Args:
            planner, lengths: as for `check`.
        """
        wide, found = planner.options.wide_documents, [lengths]
        if wide is not None:
            found = [lengths[lengths >= wide], lengths[lengths < wide]]
        alone = np.array([int(each.max()) for each in found if len(each)], dtype=np.int64)
        (documents,) = documents_in_turn([alone])
        return float(self.step.peak(planner.plan(documents.in_parts(len(alone)))).max())

    def _least(self, planner: GlobalBatchPlanner, parts: Sequence[Sequence[Documents]]) -> float:
        """Returns bytes that assigned documents need at least, before they are planned."""
        tokens = np.array([_tokens_of_ranks(each, planner.ranks) for each in parts])
        schedule = planner.options.tick_schedule(len(parts), planner.stages)
        return self.step.least(schedule, planner.servers, tokens)

    def _more(self, planner: GlobalBatchPlanner, needed: float, count: int) -> int:
        """Returns a larger number of micro-batches, of which all may fit."""
        state = max(self.step.state_bytes(*planner.servers.shape))
        if self.nbytes <= state:
            return 2 * count
        return max(count + 1, math.floor(count * (needed - state) / (self.nbytes - state)))


def _joined(incoming: Sequence[Documents]) -> Documents:
    return Documents(
        np.concatenate([each.lengths for each in incoming]),
        np.concatenate([each.starts for each in incoming]),
    )


def _tokens_of_ranks(of_pools: Sequence[Documents], ranks: int) -> Int64s:
    """Returns the tokens of a micro-batch on each rank, whose pools share theirs evenly,
    `[ranks]`."""
    size = ranks // len(of_pools)
    return np.repeat([int(each.lengths.sum()) // size for each in of_pools], size)


def _is_one_document(parts: Sequence[Sequence[Documents]]) -> bool:
    """Returns whether the largest micro-batch of a pool has a single document."""
    pools, largest, tokens = max(map(len, parts)), parts[0][0], -1
    for some in parts:
        for each in some:
            # Those of wide documents are shared by all pools.
            mine = int(each.lengths.sum()) * len(some) // pools
            if mine > tokens:
                largest, tokens = each, mine
    return int((largest.starts != PADDING).sum()) <= 1
