"""The best parallel configuration of each system for a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from distca.plan import Mask
from distca.plan.span import Int64s
from distca.schedule import document_loads
from distca.simulate.baselines import BASELINES
from distca.simulate.hybrid import HYBRID
from distca.simulate.layer_mean import LayerMean
from distca.simulate.outcome import Outcome
from distca.simulate.search import (
    DISTCA_SYSTEMS,
    Candidate,
    Workload,
    candidates,
    divisions,
    options_of,
    simulate,
    with_chains,
    with_head_groups,
    with_kept_inputs,
    with_less_memory,
    without_latents,
)

TITLES = {
    "packed": "plain Megatron",
    "cp-p2p": "context parallel, ring",
    "cp-a2a": "context parallel, all-to-all",
    "cp-a2a+p2p": "context parallel, a2a+p2p",
    "per-document-cp": "context parallel, all-gather",
    HYBRID: "hybrid context parallel",
    "wlb-llm": "WLB-LLM, ideal",
    "wlb-llm-paper": "WLB-LLM as in the paper",
    "greedy": "DistCA, greedy",
    "tiles": "DistCA, tiles",
}
"""Names of the systems for readers."""
_COMPARED = 3
"""Configurations with `--distca` that run all batches."""
_TRIES = 4
"""Bound on the configurations that run the first batch once one fits, per one that is to fit."""
_WORTH_IT = 1.01
"""Ratio up to which steps count as equally long: each head group, and smaller micro-batches, cost a
little that is not simulated, such as smaller kernels."""


@dataclass(frozen=True)
class Choice:
    """A system in its best configuration.

    Attributes:
        system: one of `SYSTEMS`.
        candidate: best configuration; None: all are out of memory, or nothing divides.
        seconds: time of an iteration, the mean over all batches.
        tokens_per_second: throughput of all GPUs together.
        memory_gb: memory of the GPU that needs most, over all batches.
        idle: share of the time in which compute is not busy.
        exposed: share of the time in which compute waits for exchanges, and for others in them.
        tried: number of configurations that divide the workload.
        simulated: number of configurations that ran.
        out_of_memory: number of configurations that are known not to fit.
    """

    system: str
    candidate: Candidate | None
    seconds: float
    tokens_per_second: float
    memory_gb: float
    idle: float
    exposed: float
    tried: int
    simulated: int
    out_of_memory: int


def advise(
    workload: Workload,
    batches: Sequence[Sequence[Int64s]],
    systems: Sequence[str],
    tensor: Sequence[int],
    stages: Sequence[int],
    finalists: int = 6,
    progress: Callable[[str], None] = lambda what: None,
    tolerances: Sequence[float] = (),
) -> list[Choice]:
    """Finds the best configuration of each system.

    All configurations of a baseline run all batches, until they do not fit. With `--distca`, whose
    planning takes longer, configurations run the first batch in the order of `estimate`, until
    enough of them fit; the best of these run all batches, and the very best with chains, head
    groups, keys and values instead of latents, other tolerances, and inputs that are kept, too.

    Args:
        workload: model, cluster and sizes.
        batches: sequences of each global batch, as `simulate` takes them.
        systems: names in `SYSTEMS`.
        tensor: tensor-parallel sizes to try.
        stages: pipeline sizes to try.
        finalists: configurations with `--distca` that are to fit in the first batch.
        progress: function that is called with each configuration that is simulated.
        tolerances: values of `Candidate.tolerance` to try beside the workload's.

    Raises:
        ValueError: there is no batch or no such system.
    """
    if not batches:
        raise ValueError("no batches to simulate: give at least 1")
    sizes = tensor, stages, finalists
    return [_best(workload, batches, s, *sizes, progress, tolerances) for s in systems]


def _best(
    workload: Workload,
    batches: Sequence[Sequence[Int64s]],
    system: str,
    tensor: Sequence[int],
    stages: Sequence[int],
    finalists: int,
    progress: Callable[[str], None],
    tolerances: Sequence[float],
) -> Choice:
    every = divisions(system, workload, tensor, stages)
    left = candidates(system, workload, tensor, stages)
    able, wanted, compared = len(left), len(left), len(left)
    if system in DISTCA_SYSTEMS:
        left.sort(key=lambda candidate: estimate(candidate, workload, batches[0]))
        wanted, compared = finalists, _COMPARED
    trials = _Trials(workload, batches, progress)
    best: Candidate | None = None
    while left and best is None:
        fitting = trials.walk(left, wanted)
        fitting.sort(key=lambda candidate: trials.outcomes[candidate][0].seconds)
        whole = islice((c for c in fitting if trials.fits(c, len(batches))), compared)
        best = min(whole, key=lambda c: _seconds(trials.outcomes[c]), default=None)
        # What does not fit in a later batch may with fewer micro-batches in flight.
        left[:0] = trials.with_less_memory(fitting)
    if best is not None and system in DISTCA_SYSTEMS:
        best = trials.in_head_groups(trials.without_latents(trials.in_chains(best)))
        best = trials.with_kept_inputs(trials.with_best_tolerance(best, tolerances))
    failed = len(every) - able + trials.failed(left)
    simulated = len({sizes_of(candidate) for candidate in trials.outcomes})
    if best is None:
        none = float("nan")
        return Choice(system, None, none, none, none, none, none, len(every), simulated, failed)
    outcomes = trials.outcomes[best]
    return Choice(
        system,
        best,
        _seconds(outcomes) / len(outcomes),
        sum(outcome.tokens for outcome in outcomes) / _seconds(outcomes),
        max(float(outcome.memory_bytes.max()) for outcome in outcomes) / 1e9,
        float(np.mean([outcome.idle for outcome in outcomes])),
        float(np.mean([outcome.exposed.mean() / outcome.seconds for outcome in outcomes])),
        len(every),
        simulated,
        failed,
    )


@dataclass
class _Trials:
    """Simulated iterations of one system's configurations.

    Attributes:
        workload: model, cluster and sizes.
        batches: global batches that configurations run, until one does not fit.
        progress: function that is called with each configuration.
        outcomes: outcomes of each configuration in the batches that it ran, the first ones.
    """

    workload: Workload
    batches: Sequence[Sequence[Int64s]]
    progress: Callable[[str], None]
    outcomes: dict[Candidate, list[Outcome]] = field(default_factory=dict)

    def fits(self, candidate: Candidate, count: int) -> bool:
        """Whether a configuration fits in memory in the first batches; runs those not run yet."""
        mine = self.outcomes.setdefault(candidate, [])
        while len(mine) < count and all(outcome.fits for outcome in mine):
            self.progress(f"{candidate.system}: {candidate}")
            mine.append(simulate(candidate, self.workload, self.batches[len(mine)]))
        return all(outcome.fits for outcome in mine)

    def walk(self, left: list[Candidate], wanted: int) -> list[Candidate]:
        """Takes from the front of `left` until enough fit in the first batch; returns these.

        Stops early once one fits and `_TRIES` times as many as wanted have run; goes on to the end
        if none fits.
        """
        fitting: list[Candidate] = []
        tries = 0
        while left and len(fitting) < wanted and (not fitting or tries < _TRIES * wanted):
            candidate = left.pop(0)
            tries += 1
            if self.fits(candidate, 1):
                fitting.append(candidate)
            else:
                left[:0] = with_less_memory(candidate, self.workload)
        return fitting

    def with_less_memory(self, fitting: Sequence[Candidate]) -> list[Candidate]:
        """Substitutes for configurations that fit in the first batch, but not in a later one."""
        failed = [c for c in fitting if not all(outcome.fits for outcome in self.outcomes[c])]
        less = [other for each in failed for other in with_less_memory(each, self.workload)]
        return [candidate for candidate in less if candidate not in self.outcomes]

    def in_chains(self, best: Candidate) -> Candidate:
        """The configuration with the shortest chains that is about as fast as the fastest."""
        return self._about_fastest(best, with_chains(best, self.workload))

    def without_latents(self, best: Candidate) -> Candidate:
        """The configuration with what travels for keys and values if that is the fastest."""
        return self._fastest(best, without_latents(best, self.workload))

    def with_kept_inputs(self, best: Candidate) -> Candidate:
        """The configuration that keeps inputs if it fits and is the fastest."""
        return self._fastest(best, with_kept_inputs(best, self.workload))

    def in_head_groups(self, best: Candidate) -> Candidate:
        """The configuration with the fewest head groups that is about as fast as the fastest."""
        return self._about_fastest(best, with_head_groups(best, self.workload))

    def with_best_tolerance(self, best: Candidate, tolerances: Sequence[float]) -> Candidate:
        """The configuration with the tolerance that is fastest: it costs a user nothing."""
        return self._fastest(best, [replace(best, tolerance=each) for each in tolerances])

    def _fastest(self, best: Candidate, others: Sequence[Candidate]) -> Candidate:
        able = [best, *(c for c in others if self.fits(c, len(self.batches)))]
        return min(able, key=lambda candidate: _seconds(self.outcomes[candidate]))

    def _about_fastest(self, best: Candidate, others: Sequence[Candidate]) -> Candidate:
        able = [best, *(c for c in others if self.fits(c, len(self.batches)))]
        fastest = min(_seconds(self.outcomes[c]) for c in able)
        return next(c for c in able if _seconds(self.outcomes[c]) <= _WORTH_IT * fastest)

    def failed(self, left: Sequence[Candidate]) -> int:
        """Counts configurations that ran and do not fit, with any bound of micro-batches in flight.

        Args:
            left: configurations that have not run; whether their sizes fit is not known.
        """
        able = {sizes_of(c) for c, mine in self.outcomes.items() if all(o.fits for o in mine)}
        unknown = {sizes_of(candidate) for candidate in left}
        return len({sizes_of(candidate) for candidate in self.outcomes} - able - unknown)


def sizes_of(candidate: Candidate) -> Candidate:
    """The configuration that `divisions` gave, without bound, chains, head groups, tolerance, and
    choice of latents and inputs."""
    micro_batches = candidate.micro_batches // candidate.chain
    return replace(
        candidate,
        micro_batches=micro_batches,
        chain=1,
        max_in_flight=None,
        head_groups=1,
        may_send_latents=True,
        keeps_inputs=False,
        tolerance=None,
    )


def _seconds(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.seconds for outcome in outcomes)


def estimate(candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]) -> float:
    """Seconds of an iteration if core attention were perfectly shared out and exchanges free.

    Args:
        candidate: a configuration with `--distca`.
        workload: model, cluster and sizes.
        sequences: lengths of the documents in each sequence of a global batch.
    """
    assert candidate.system not in BASELINES, candidate.system
    costs = workload.costs(candidate.tensor)
    kernels = LayerMean.of(costs.cluster.attention_cost(costs.shape), workload.model)
    attention = document_loads(np.concatenate(sequences), Mask(), kernels).sum()
    both_ways = float(costs.passes @ [1, costs.cluster.backward_over_forward])
    shared = (
        workload.model.layers * both_ways * float(attention) / (candidate.stages * candidate.data)
    )
    tokens = workload.sequences * workload.context / (candidate.data * candidate.micro_batches)
    linear = float(costs.passes @ np.add(costs.pre_seconds(), costs.post_seconds()))
    layers = workload.model.layers // candidate.stages
    tick = tokens * (layers * linear + sum(costs.head_seconds()))
    # Layers run once for each nano-batch, the output layer once for both.
    launches = np.add(costs.pre_launch_seconds(), costs.post_launch_seconds())
    tick += 2 * layers * float(costs.passes @ launches) + sum(costs.head_launch_seconds())
    schedule = options_of(candidate).tick_schedule(candidate.micro_batches, candidate.stages)
    return shared + tick * len(schedule.ticks) / 2
