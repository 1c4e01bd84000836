"""A few micro-batches of a few server pools, which stand for an iteration with `--distca`.

Documents are shared out over all micro-batches and pools first, so that these are about equal. Then
those that are simulated tell how much longer than its ideal time each pool takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan.span import Floats, Int64s
from distca.schedule import BufferBoundError, PlannedGlobalBatch
from distca.schedule.training.planned_batch import Documents
from distca.simulate.breakdown import Breakdown, break_down_runs
from distca.simulate.costs import ModelCosts
from distca.simulate.disaggregated import simulate_ticks
from distca.simulate.outcome import Outcome
from distca.simulate.parts import document_seconds
from distca.simulate.space import ideal_seconds
from distca.simulate.workload import (
    DISTCA_SYSTEMS,
    Candidate,
    Workload,
    incoming_of,
    options_of,
    planner_of,
)

_SERVERS = 16
"""Servers whose pools are simulated, two pools at least."""
_MANY = 4
"""A few pools stand for a job that has this many times as many servers."""
_LARGE = 256
"""Product of servers and micro-batches from which on a few of these are simulated."""
_SAMPLED, _PLANNED = 8, 1024
"""Most micro-batches that are simulated without a pipeline, and their product with servers above
which they are fewer, down to 2. A pipeline has 4 for each stage."""


def has_few_parts(candidate: Candidate) -> bool:
    """Whether a few parts stand for an iteration: without chains, and in one pool of all ranks
    without a pipeline."""
    pools = candidate.pool_size is not None
    if candidate.system not in DISTCA_SYSTEMS or candidate.chain > 1:
        return False
    if candidate.stages > 1 and not pools:
        return False
    return _has_many_pools(candidate) or _has_many_micro_batches(candidate)


def _has_many_pools(candidate: Candidate) -> bool:
    size = candidate.pool_size
    if size is None or candidate.wide_documents is not None:
        return False
    return candidate.data >= _MANY * number_of_pools(candidate) * size


def _has_many_micro_batches(candidate: Candidate) -> bool:
    servers = candidate.stages * candidate.servers_of_stage
    large = servers * candidate.micro_batches >= _LARGE
    return large and candidate.micro_batches >= 2 * _sampled(candidate)


def number_of_pools(candidate: Candidate) -> int:
    """Server pools that stand for all."""
    return max(_SERVERS // (candidate.pool_size or 1), 2)


def _sampled(candidate: Candidate) -> int:
    """Micro-batches that stand for all."""
    if candidate.stages > 1:
        return 4 * candidate.stages
    return min(max(_PLANNED // candidate.servers_of_stage, 2), _SAMPLED)


def few_parts(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]
) -> Outcome | None:
    """Simulates a few micro-batches of a few server pools.

    Pools are the one with the largest micro-batch, and those with most work. Micro-batches are the
    largest one, and others from first to last; in a pipeline as many that follow each other as it
    has stages, and of the largest ones as many as are in flight. Pools of whole nodes share no
    link, so that all of them take at least as long; the reduction of gradients takes less among
    fewer replicas.

    Returns:
        Figures of these, but for all seconds, which are those of all micro-batches; None: no plan
        keeps to the bound of buffers.
    """
    try:
        return _run_all(_plan(candidate, workload, sequences), workload.costs_of(candidate))
    except BufferBoundError:
        return None


def break_down_few_parts(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]
) -> Breakdown:
    """Says what the time of an iteration is spent on, as far as a few parts tell.

    Raises:
        BufferBoundError: no plan keeps to the bound of buffers.
    """
    few = _plan(candidate, workload, sequences)

    def run(costs: ModelCosts) -> Outcome:
        return _run_all(few, costs)

    return break_down_runs(run, candidate, workload, sequences)[1]


def largest_micro_batch(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]
) -> Outcome | None:
    """Simulates the micro-batch with most tokens of a server pool, beside other pools'; None: no
    plan keeps to the bound of buffers."""
    parts = _assigned(candidate, workload, sequences)
    pools = candidate.data // (candidate.pool_size or candidate.data)
    tokens = [max(int(d.lengths.sum()) * pools // len(each) for d in each) for each in parts]
    largest = parts[int(np.argmax(tokens))]
    fullest = sorted(range(len(largest)), key=lambda n: -int(largest[n].lengths.sum()))
    chosen = fullest[: number_of_pools(candidate)] if _has_many_pools(candidate) else fullest
    try:
        planned = _planned(candidate, workload, [[largest[each] for each in chosen]])
    except BufferBoundError:
        return None
    return _run(planned, candidate, workload.costs_of(candidate))


@dataclass(frozen=True)
class _Few:
    """Plans of a few parts.

    Attributes:
        candidate: the configuration.
        planned: plans of some micro-batches of some pools.
        half: plans of about half of them, with a pipeline: what the others take has not its filling
            in it; None: without one.
        growth: ideal seconds of all other micro-batches of a pool, times those of the planned ones
            that are not in `half`, `[pools]`.
    """

    candidate: Candidate
    planned: PlannedGlobalBatch
    half: PlannedGlobalBatch | None
    growth: Floats


def _plan(candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]) -> list[_Few]:
    """Plans a few parts: of pools, and of wide documents, which all ranks share."""
    parts = _assigned(candidate, workload, sequences)
    number = candidate.data // (candidate.pool_size or candidate.data)
    kinds = [[each for each in parts if len(each) == n] for n in dict.fromkeys((1, number))]
    return [_plan_some(candidate, workload, each) for each in kinds if each]


def _plan_some(
    candidate: Candidate, workload: Workload, parts: Sequence[Sequence[Documents]]
) -> _Few:
    """Plans a few of micro-batches that have equally many pools."""
    pools = len(parts[0])
    alone = replace(candidate, data=candidate.data // pools, chain=1)
    tokens = np.array([[int(each.lengths.sum()) for each in some] for some in parts])
    # Memory depends on the largest micro-batch, or in a pipeline on those in flight together.
    schedule = options_of(alone).tick_schedule(len(parts), alone.stages)
    in_flight = schedule.most_in_flight[0]
    tokens = np.lib.stride_tricks.sliding_window_view(tokens, in_flight, axis=0).sum(axis=-1)
    largest, fullest = (int(n) for n in np.unravel_index(tokens.argmax(), tokens.shape))
    ideal = _ideal(alone, workload, parts)
    order = np.argsort(-_work(candidate, workload, parts), kind="stable").tolist()
    chosen = list(dict.fromkeys([fullest, *order]))
    if _has_many_pools(candidate):
        chosen = chosen[: number_of_pools(candidate)]
    runs, count = [range(len(parts))], _sampled(candidate)
    if _has_many_micro_batches(candidate) and len(parts) >= 2 * count:
        stages = candidate.stages
        spread = np.linspace(0, len(parts) - stages, count // stages).round().astype(np.int64)
        runs = [range(n, n + stages) for n in spread.tolist()]
        runs[np.argmin(np.abs(spread - largest))] = range(largest, largest + in_flight)

    def of_runs(some: Sequence[range]) -> list[list[Documents]]:
        return [[parts[n][pool] for pool in chosen] for run in some for n in run]

    few = of_runs(runs)
    known, half, of_half = _ideal(alone, workload, few), None, np.zeros(len(chosen))
    if candidate.stages > 1 and len(runs) > 1:
        some = of_runs(runs[::2])
        half, of_half = _planned(candidate, workload, some), _ideal(alone, workload, some)
    growth = (ideal[chosen] - known) / (known - of_half)
    return _Few(candidate, _planned(candidate, workload, few), half, growth)


def _assigned(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]
) -> list[list[Documents]]:
    """Returns the documents of each micro-batch and server pool."""
    planner, incoming = planner_of(candidate, workload), incoming_of(candidate, workload, sequences)
    if candidate.pool_size is None:
        return [[documents] for documents in planner.share_out(incoming)]
    return planner.assign(incoming)


def _work(candidate: Candidate, workload: Workload, parts: Sequence[Sequence[Documents]]) -> Floats:
    """Returns the work by which documents are assigned to pools, in seconds of a rank,
    `[pools]`."""
    costs, work = workload.costs_of(candidate), []
    of_token = float(costs.passes @ costs.layer_seconds())
    both_ways = float(costs.passes @ [1, costs.cluster.backward_over_forward])
    for of_pool in zip(*parts, strict=True):
        lengths = np.concatenate([documents.lengths for documents in of_pool])
        attention = both_ways * document_seconds(workload, costs, lengths)
        work.append(attention + of_token * float(lengths.sum()))
    return np.array(work)


def _ideal(
    candidate: Candidate, workload: Workload, parts: Sequence[Sequence[Documents]]
) -> Floats:
    """Returns the ideal seconds of each pool, `[pools]`."""
    some = replace(candidate, micro_batches=len(parts))
    ticks = len(options_of(some).tick_schedule(len(parts), some.stages).ticks)
    return np.array(
        [
            ideal_seconds(some, workload, np.concatenate([d.lengths for d in each]), ticks)
            for each in zip(*parts, strict=True)
        ]
    )


def _planned(
    candidate: Candidate, workload: Workload, parts: Sequence[Sequence[Documents]]
) -> PlannedGlobalBatch:
    """Plans micro-batches of pools."""
    if candidate.pool_size is None:
        return planner_of(candidate, workload).plan([documents for (documents,) in parts])
    size = candidate.pool_size
    if len(parts[0]) == 1 < candidate.data // size:
        # All ranks are one pool.
        size = candidate.data
    few = replace(candidate, data=len(parts[0]) * size, pool_size=size, wide_documents=None)
    planner = planner_of(few, workload)
    return planner.with_ticks(planner.plan_assigned(parts))


def _run_all(some: Sequence[_Few], costs: ModelCosts) -> Outcome:
    """Simulates a few parts; returns figures of those that need most memory, and the seconds of
    all."""
    found = []
    for few in some:
        outcome = _run(few.planned, few.candidate, costs)
        taken = more = _seconds_of_pools(few, outcome)
        if few.half is not None:
            more = taken - _seconds_of_pools(few, _run(few.half, few.candidate, costs))
        reduction = outcome.seconds - float(taken.max())
        seconds = float((taken + few.growth * more).max()) + reduction
        factor = seconds / outcome.seconds
        outcome = replace(
            outcome,
            seconds=seconds,
            computed=factor * outcome.computed,
            exposed=factor * outcome.exposed,
        )
        found.append((outcome, reduction))
    most = max((each for each, _ in found), key=lambda each: float(each.memory_bytes.max()))
    # Gradients are reduced once.
    once = sum(reduction for _, reduction in found[1:])
    return replace(most, seconds=sum(each.seconds for each, _ in found) - once)


def _seconds_of_pools(few: _Few, outcome: Outcome) -> Floats:
    """Returns the seconds of each pool's ticks, `[pools]`; a pool has the same ranks of all
    stages."""
    assert outcome.clock is not None
    found: Floats = outcome.clock.reshape(few.candidate.stages, len(few.growth), -1).max(
        axis=(0, 2)
    )
    return found


def _run(planned: PlannedGlobalBatch, candidate: Candidate, costs: ModelCosts) -> Outcome:
    return simulate_ticks(planned, costs, backward="keep" if candidate.keeps_inputs else "resend")
