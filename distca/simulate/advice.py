"""The best parallel configuration of each system for a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.plan.span import Int64s
from distca.simulate.baselines import BASELINES
from distca.simulate.costs import ModelCosts
from distca.simulate.outcome import Outcome
from distca.simulate.search import WAYS, Candidate, Job, candidates, divisions, simulate

TITLES = {
    "packed": "plain Megatron",
    "per-document-cp": "context parallel, per document",
    "wlb-llm": "WLB-LLM, ideal",
    "greedy": "DistCA, greedy",
    "tiles": "DistCA, tiles",
}
"""What a reader knows the systems as."""


@dataclass(frozen=True)
class Choice:
    """A system at its best.

    Attributes:
        system: its name.
        candidate: its configuration; None: everything is out of memory, or nothing divides.
        seconds: of an iteration, the mean over all batches.
        tokens_per_second: of all GPUs.
        memory_gb: of the GPU that needs most, over all batches.
        idle: the part of the time in which compute is not busy.
        exposed: the part in which it waits for exchanges, and for others in them.
        tried: configurations that divide the job.
        out_of_memory: those of them that are known not to fit.
    """

    system: str
    candidate: Candidate | None
    seconds: float
    tokens_per_second: float
    memory_gb: float
    idle: float
    exposed: float
    tried: int
    out_of_memory: int


def advise(
    job: Job,
    batches: Sequence[Sequence[Int64s]],
    systems: Sequence[str],
    tensor: Sequence[int],
    stages: Sequence[int],
    finalists: int = 6,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Choice]:
    """The best configuration of each system.

    All configurations of a baseline run the first batch. With `--distca`, whose planning takes
    longer, those that promise most by `estimate` do. The three best run all batches.

    Args:
        job: what is trained.
        batches: of each global batch its sequences: see `simulate`.
        systems: of `SYSTEMS`.
        tensor: tensor-parallel sizes to try.
        stages: pipeline sizes to try.
        finalists: configurations with `--distca` that run the first batch.
        progress: told what was simulated.

    Raises:
        ValueError: there is no batch or no such system.
    """
    if not batches:
        raise ValueError("no batches to simulate: give at least 1")
    return [_best(job, batches, s, tensor, stages, finalists, progress) for s in systems]


def _best(
    job: Job,
    batches: Sequence[Sequence[Int64s]],
    system: str,
    tensor: Sequence[int],
    stages: Sequence[int],
    finalists: int,
    progress: Callable[[str], None],
) -> Choice:
    every = divisions(system, job, tensor, stages)
    able = candidates(system, job, tensor, stages)
    failed = len(every) - len(able)
    if system in WAYS:
        able.sort(key=lambda candidate: estimate(candidate, job, batches[0]))
        able = able[:finalists]
    first: dict[Candidate, Outcome] = {}
    for candidate in able:
        progress(f"{system}: {candidate}")
        outcome = simulate(candidate, job, batches[0])
        if outcome.fits:
            first[candidate] = outcome
        else:
            failed += 1
    best: tuple[Candidate, list[Outcome]] | None = None
    for candidate in sorted(first, key=lambda c: first[c].seconds)[:3]:
        outcomes = [first[candidate]]
        for batch in batches[1:]:
            progress(f"{system}: {candidate}")
            outcomes.append(simulate(candidate, job, batch))
        fits = all(outcome.fits for outcome in outcomes)
        if fits and (best is None or _seconds(outcomes) < _seconds(best[1])):
            best = candidate, outcomes
    if best is None:
        none = float("nan")
        return Choice(system, None, none, none, none, none, none, len(every), failed)
    candidate, outcomes = best
    return Choice(
        system,
        candidate,
        _seconds(outcomes) / len(outcomes),
        sum(outcome.tokens for outcome in outcomes) / _seconds(outcomes),
        max(float(outcome.memory_bytes.max()) for outcome in outcomes) / 1e9,
        float(np.mean([outcome.idle for outcome in outcomes])),
        float(np.mean([outcome.exposed.mean() / outcome.seconds for outcome in outcomes])),
        len(every),
        failed,
    )


def _seconds(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.seconds for outcome in outcomes)


def estimate(candidate: Candidate, job: Job, sequences: Sequence[Int64s]) -> float:
    """Seconds of an iteration if core attention were perfectly shared out and exchanges free.

    Args:
        candidate: a configuration with `--distca`.
        job: what is trained.
        sequences: of a global batch.
    """
    c = candidate
    assert c.system not in BASELINES, c.system
    costs = ModelCosts(job.model, job.cluster, c.tensor)
    lengths = np.concatenate(sequences)
    pairs = lengths * (lengths + 1) // 2
    attention = costs.cluster.attention_cost(costs.shape).seconds(lengths, lengths, pairs).sum()
    both_ways = 1 + costs.cluster.backward_over_forward
    shared = job.model.layers * both_ways * float(attention) / (c.stages * c.data)
    tokens = job.sequences * job.context / (c.data * c.micro_batches)
    linear = sum(costs.pre_seconds()) + sum(costs.post_seconds())
    tick = tokens * (job.model.layers // c.stages * linear + sum(costs.head_seconds()))
    way = replace(WAYS[c.system](), max_in_flight=c.max_in_flight)
    return shared + tick * len(way.ticks(c.micro_batches, c.stages).ticks) / 2
