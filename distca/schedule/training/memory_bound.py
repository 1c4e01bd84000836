"""Micro-batches of server pools whose number, and whose number in flight, memory bounds.

The documents of a global batch are shared out over as many micro-batches as the job's flags say,
and over more where one would not fit. Documents stay whole, so the longest ones decide how far that
helps. A pipeline's stage holds the activations of several micro-batches. Where more micro-batches
do not suffice, fewer are in flight, which takes more ticks; in the end one is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from distca.plan import BLOCK
from distca.plan.span import Int64s
from distca.schedule.training.global_batch import GlobalBatchPlanner
from distca.schedule.training.peak_memory import StepMemory
from distca.schedule.training.planned_batch import (
    PADDING,
    Documents,
    PlannedGlobalBatch,
    PlannedMicroBatch,
    documents_in_turn,
)
from distca.schedule.training.tick_schedule import TickSchedule

_BESIDE = 1.02
"""Bytes in which a document fits, as a multiple of those it needs alone: buffers have the largest
size in any pool, and documents of other pools may take a little more of one."""
_NEARLY = 1.01
"""Bytes which more micro-batches hardly lower, as a multiple of those of single documents."""


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

        Where no number of them fits, fewer are in flight, as many as fit.

        Args:
            planner: planner of a job with server pools.
            incoming: documents of each micro-batch, as for `GlobalBatchPlanner.plan`.

        Returns:
            The plans, and the peak bytes of the GPU that needs most. These exceed the bound only if
            they do with the longest documents alone in micro-batches, and one of these in flight.
        """
        search = _Search(self, planner, _joined(incoming), len(incoming))
        given = planner.options.max_in_flight
        found: tuple[PlannedGlobalBatch, float] | None = None
        if planner.stages == 1 or search.may_fit(given):
            found = search.fewest(given)
            if found[1] <= self.nbytes or planner.stages == 1:
                return found
        bounds = search.fewer_in_flight()
        # The largest one that may fit mostly does.
        low, high, middle = 0, len(bounds), len(bounds) - 1
        while found is None or low < high:
            other = search.fewest(bounds[middle])
            fits = other[1] <= self.nbytes
            if found is None or fits or other[1] < found[1]:
                found = other
            low, high = (middle + 1, high) if fits else (low, middle)
            middle = (low + high) // 2
        return found

    def check(self, planner: GlobalBatchPlanner, lengths: Int64s) -> None:
        """Checks that each document fits alone in a micro-batch, with no other one in flight.

        Args:
            planner: planner of a job with server pools.
            lengths: tokens of each document, `[documents]`.

        Raises:
            ValueError: the longest one does not; the message says what to do.
        """
        needed = _BESIDE * self.needed_alone(planner, lengths)
        if needed <= self.nbytes:
            return
        longest = int(lengths.max())
        state = max(self.step.state_bytes(*planner.servers.shape))
        shorter = self._that_fits(planner, lengths, needed)
        remedy = "share the model among more GPUs (--tensor-model-parallel-size)"
        if shorter > 0:
            wide = "" if planner.stages > 1 else "--distca-wide-documents, "
            remedy = (
                f"cut documents at {shorter:,} tokens (--distca-max-document-length), share them "
                f"among more ranks (--distca-pool-size, {wide}--tensor-model-parallel-size) or "
                "recompute (--recompute-granularity full)"
            )
        raise ValueError(
            f"the longest document, of {longest:,} tokens, needs {_size(needed)} of a GPU alone in "
            f"a micro-batch, {_size(state)} of them for the model's state, but {self.limit} allows "
            f"{_size(self.nbytes)}: {remedy}, or raise --distca-memory-gb"
        )

    def why_above(self, planned: PlannedGlobalBatch, peak: float) -> str:
        """Returns why a global batch needs more than the bound, and what to do.

        Args:
            planned, peak: what `plan` returned.
        """
        in_flight = ""
        if planned.schedule.stages > 1:
            chunks = planned.schedule.chunks
            most = -(-max(planned.schedule.most_in_flight) // chunks)
            in_flight = f", at most {most} in flight"
        return (
            f"needs {_size(peak)} of a GPU, but {self.limit} allows {_size(self.nbytes)}: its "
            f"longest documents need as much in {planned.schedule.micro_batches} micro-batches"
            f"{in_flight}, and neither more micro-batches nor fewer in flight lower it. Shorten "
            "documents (--distca-max-document-length), share them among more ranks "
            "(--distca-pool-size), recompute (--recompute-granularity full) or raise "
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

    def _that_fits(self, planner: GlobalBatchPlanner, lengths: Int64s, needed: float) -> int:
        """Returns tokens at which documents are cut so that each fits alone; 0: none does.

        Args:
            planner, lengths: as for `check`.
            needed: what the longest one needs alone, more than the bound.
        """
        state = max(self.step.state_bytes(*planner.servers.shape))
        tokens, room = int(lengths.max()), max(self.nbytes - state, 0.0)
        while tokens > 0 and needed > self.nbytes:
            # Bytes grow about as tokens do.
            fewer = min(int(tokens * room / (needed - state)), tokens - 1)
            tokens = fewer // BLOCK * BLOCK
            if tokens:
                cut = np.minimum(lengths, tokens)
                needed = _BESIDE * self.needed_alone(planner, cut)
        return tokens


@dataclass(frozen=True)
class _Search:
    """A search for the number of micro-batches of a global batch, and for those in flight.

    Attributes:
        bound: bound of a step's memory.
        planner: planner of a job with server pools.
        every: documents of the global batch.
        fewest_micro_batches: least number of micro-batches.
        assigned: documents of each pool in each micro-batch, by the number of micro-batches.
        planned: planned micro-batches, by their number.
    """

    bound: MemoryBound
    planner: GlobalBatchPlanner
    every: Documents
    fewest_micro_batches: int
    assigned: dict[int, list[list[Documents]]] = field(default_factory=dict)
    planned: dict[int, list[PlannedMicroBatch]] = field(default_factory=dict)

    def fewest(self, in_flight: int | None) -> tuple[PlannedGlobalBatch, float]:
        """Plans with as few micro-batches as fit, and else with those that need least.

        Args:
            in_flight: most micro-batches in flight; None: no bound.

        Returns:
            The plans and their peak bytes.
        """
        allowed, count = self.bound.nbytes, self.fewest_micro_batches
        found: tuple[PlannedGlobalBatch, float] | None = None
        while True:
            needed = self._least(count, in_flight)
            single = needed > allowed and self._is_single(count, in_flight)
            if needed <= allowed or single:
                planned = self._plan(count, in_flight)
                needed = float(self.bound.step.peak(planned).max())
                if found is None or needed < found[1]:
                    found = planned, needed
                if needed <= allowed:
                    return found
                single = single or self._is_single(count, in_flight)
                if count >= self._most or (single and self._others_are_small(count)):
                    return found
            count = min(self._more(needed, count, single), self._most)

    def may_fit(self, in_flight: int | None) -> bool:
        """Returns whether any number of micro-batches may fit with this number in flight."""
        allowed = self.bound.nbytes
        if self._least(self.fewest_micro_batches, in_flight) <= allowed:
            return True
        return self._floor(in_flight) <= allowed

    def fewer_in_flight(self) -> list[int]:
        """Lists numbers in flight that may fit, from 1 on: at least 1 itself."""
        usual = self._schedule(len(self._longest), self.planner.options.max_in_flight)
        most = -(-max(usual.most_in_flight) // usual.chunks)
        found = [n for n in range(1, most) if self.may_fit(n)]
        return found or [1]

    @property
    def _most(self) -> int:
        return max(len(self.every.lengths), self.fewest_micro_batches)

    @cached_property
    def _longest(self) -> Int64s:
        """Tokens of each rank in the first micro-batches if each has one document at most,
        `[micro-batches, ranks]`.

        The longest documents come first, and those in flight together decide.
        """
        tokens = self._tokens(self._most)
        if self.planner.stages == 1:
            return tokens.max(axis=0, keepdims=True)
        return tokens[: 4 * self.planner.stages]

    def _floor(self, in_flight: int | None) -> float:
        """Returns bytes that documents need at least, whatever the number of micro-batches is."""
        return self._least_of(self._schedule(len(self._longest), in_flight), self._longest)

    def _is_single(self, count: int, in_flight: int | None) -> bool:
        """Returns whether the micro-batches that need most have one document each."""
        if count >= self._most:
            return True
        return self._least(count, in_flight) <= _NEARLY * self._floor(in_flight)

    def _least(self, count: int, in_flight: int | None) -> float:
        """Returns bytes that assigned documents need at least, before they are planned."""
        return self._least_of(self._schedule(count, in_flight), self._tokens(count))

    def _least_of(self, schedule: TickSchedule, tokens: Int64s) -> float:
        return self.bound.step.least(schedule, self.planner.servers, tokens)

    def _tokens(self, count: int) -> Int64s:
        ranks = self.planner.ranks
        return np.array([_tokens_of_ranks(each, ranks) for each in self._assign(count)])

    def _assign(self, count: int) -> list[list[Documents]]:
        if count not in self.assigned:
            self.assigned[count] = self.planner.assign(self.every.in_parts(count))
        return self.assigned[count]

    def _schedule(self, count: int, in_flight: int | None) -> TickSchedule:
        options = replace(self.planner.options, max_in_flight=in_flight)
        return options.tick_schedule(count, self.planner.stages)

    def _plan(self, count: int, in_flight: int | None) -> PlannedGlobalBatch:
        if count not in self.planned:
            self.planned[count] = self.planner.plan_assigned(self._assign(count))
        return self.planner.with_ticks(self.planned[count], self._schedule(count, in_flight))

    def _more(self, needed: float, count: int, single: bool) -> int:
        """Returns a larger number of micro-batches, which may all fit.

        Args:
            needed: peak bytes with `count` micro-batches.
            count: number of micro-batches.
            single: whether those that need most have one document.
        """
        state = max(self.bound.step.state_bytes(*self.planner.servers.shape))
        if self.bound.nbytes <= state:
            return 2 * count
        larger = math.floor(count * (needed - state) / (self.bound.nbytes - state))
        return max(count + 1, 5 * count // 4 if single else 0, larger)

    def _others_are_small(self, count: int) -> bool:
        """Returns whether micro-batches of several documents have at most half the tokens of the
        largest one, so that more micro-batches lower no peak."""
        several = largest = 0.0
        for of_pools in self._assign(count):
            for each in of_pools:
                # Those of wide documents are shared by all pools.
                tokens = float(each.lengths.sum()) * len(of_pools)
                largest = max(largest, tokens)
                if int((each.starts != PADDING).sum()) > 1:
                    several = max(several, tokens)
        return several <= largest / 2


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


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"
