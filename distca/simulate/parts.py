"""Parts of an iteration with `--distca` that stand for it where all of it takes long to plan.

A few server pools stand for many, and a few micro-batches and two ticks for many. Each function
takes a configuration, a workload and the sequences of a global batch, and may run in
another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from distca.cost.volume import BackwardInputs
from distca.plan import Mask
from distca.plan.span import Floats, Int64s
from distca.schedule import (
    BufferBoundError,
    PlannedGlobalBatch,
    Tick,
    TickSchedule,
    Work,
    document_loads,
)
from distca.simulate.breakdown import Breakdown, break_down
from distca.simulate.costs import ModelCosts
from distca.simulate.disaggregated import seconds_of_ticks
from distca.simulate.outcome import Outcome
from distca.simulate.space import estimate
from distca.simulate.workload import Candidate, Workload, incoming_of, planner_of, simulate

PartFigures = TypeVar("PartFigures", covariant=True)

SAMPLED = 4
"""Micro-batches of each stage that a sample has. With two a small job needed a seventh more memory
than its sample, with four a twentieth."""


class Part(Protocol[PartFigures]):
    """A function that simulates a part of an iteration."""

    def __call__(
        self, candidate: Candidate, workload: Workload, sequences: Sequence[Int64s], /
    ) -> PartFigures: ...


class RunParts(Protocol):
    """What simulates the same part of several configurations, perhaps at a time."""

    def __call__(
        self, part: Part[PartFigures], some: Sequence[Candidate], /
    ) -> list[PartFigures]: ...


@dataclass(frozen=True)
class Sample:
    """An iteration of a configuration's first micro-batches.

    Attributes:
        outcome: figures of these alone.
        estimated: value of `estimate` for them.
    """

    outcome: Outcome
    estimated: float


def sample(candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]) -> Sample | None:
    """Simulates the first micro-batches; None: no plan keeps to the bound of buffers."""
    few, part, some = _first_chains(candidate, workload, sequences, SAMPLED * candidate.stages)
    try:
        return Sample(simulate(few, part, some), estimate(few, part, some))
    except BufferBoundError:
        return None


def parts_of_sample(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]
) -> Breakdown:
    """Returns what the time of a sample is spent on.

    Raises:
        BufferBoundError: no plan keeps to the bound of buffers.
    """
    return break_down(*_first_chains(candidate, workload, sequences, SAMPLED * candidate.stages))


@dataclass(frozen=True)
class Glance:
    """A forward and a backward tick, in which all stages run a configuration's first micro-batches.

    Attributes:
        slower: how many times as long as their `estimate` they take.
        estimated: value of `estimate` for the whole iteration.
    """

    slower: float
    estimated: float

    @property
    def seconds(self) -> float:
        """Seconds of the iteration if all its ticks are like these."""
        return self.slower * self.estimated

    def goes_on(self, sample: Sample) -> float:
        """Returns the seconds of the iteration if its ticks are like these after the sample."""
        return sample.outcome.seconds + self.slower * (self.estimated - sample.estimated)


def glance(candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]) -> Glance | None:
    """Simulates two ticks; None: no plan keeps to the bound of buffers."""
    stages = candidate.stages
    few, part, some = _first_chains(candidate, workload, sequences, -(-stages // candidate.chain))
    planner, costs = planner_of(few, part), workload.costs_of(candidate)
    try:
        micro_batches = planner.micro_batches(incoming_of(few, part, some))
        work = tuple(Work(number, 0) for number in reversed(range(stages)))
        # In a pipeline no forward tick is followed by the backward one of the same micro-batches.
        ticks = (Tick("backward", work), Tick("forward", work))
        if stages == 1:
            ticks = ticks[::-1]
        planned = PlannedGlobalBatch(
            TickSchedule(len(micro_batches), stages, 1, ticks, candidate.chain),
            planner.servers,
            tuple(micro_batches),
            planner.ticks(micro_batches, ticks),
            planner.masks,
        )
    except BufferBoundError:
        return None
    backward: BackwardInputs = "keep" if candidate.keeps_inputs else "resend"
    seconds = seconds_of_ticks(planned, costs, backward=backward)
    # All stages together do as much in a pair of ticks as one micro-batch needs.
    number = len(micro_batches)
    ideal = estimate(few, part, some, ticks=2 * number) / number
    return Glance(seconds / ideal, estimate(candidate, workload, sequences))


def _first_chains(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s], chains: int
) -> tuple[Candidate, Workload, Sequence[Int64s]]:
    """Returns the configuration, workload and sequences of the first micro-batches alone."""
    number = workload.sequences * candidate.chain // candidate.micro_batches * chains
    few = replace(candidate, micro_batches=chains * candidate.chain)
    return few, replace(workload, sequences=number), sequences[:number]


def document_seconds(workload: Workload, costs: ModelCosts, lengths: Int64s) -> float:
    """Returns the forward seconds of documents in a mean layer, on one GPU with its heads."""
    if not workload.model.sees_all:
        # A task's share of its tiles is an average, so that cuts may save some with windows.
        return float(visible_pairs(workload, lengths).sum()) * pair_seconds(costs)
    kernel = costs.cluster.attention_cost(costs.shape)
    return float(document_loads(lengths, Mask(), kernel).sum())


def pair_seconds(costs: ModelCosts) -> float:
    """Returns the forward seconds of a pair on one GPU with its heads."""
    return costs.shape.flops_per_pair / (costs.cluster.attention_tflops * 1e12)


def visible_pairs(workload: Workload, lengths: Int64s) -> Floats:
    """Returns the visible pairs of each document in a mean layer, `[documents]`."""
    model, zeros = workload.model, np.zeros_like(lengths)
    masks: list[Mask] = [model.masks.of_layer(number) for number in range(model.layers)]
    pairs: Floats = np.zeros(len(lengths))
    for mask in dict.fromkeys(masks):
        share = masks.count(mask) / len(masks)
        pairs = pairs + share * mask.pairs(zeros, lengths, zeros, lengths)
    return pairs
