"""Parts of an iteration's time: what it would take if one cost after another were free.

The iteration is simulated again with the same plans, or packed again in the same layout, on a
cluster without interference, then also without time on links, without copies, and without launches
and half-filled waves. What each step saves is the time of that part. Ideal shares of the linear
layers and of core attention are counted, and the rest of the time is spent waiting: for slower
ranks, in the bubbles of a pipeline, and for what cutting documents costs kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from distca.cost.volume import BackwardInputs
from distca.plan import Mask
from distca.plan.span import Int64s
from distca.schedule import document_loads
from distca.simulate.baselines import BASELINES, simulate_baseline
from distca.simulate.costs import ModelCosts
from distca.simulate.disaggregated import simulate_ticks
from distca.simulate.hybrid import HYBRID, plan_hybrid, simulate_hybrid
from distca.simulate.layer_mean import LayerMean
from distca.simulate.outcome import Outcome
from distca.simulate.workload import (
    Candidate,
    Workload,
    incoming_of,
    layout_of,
    planner_of,
)

_FREE_GB_PER_S = 1e12
"""Speed of links and memories that take no time."""
_WORK = ("linear", "attention")
"""Parts that every system has."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds of an iteration by what they are spent on; their sum is the iteration.

    A part may be negative by a little: without it a baseline packs documents otherwise.

    Attributes:
        linear: linear layers, if all ranks had equal shares and no bubbles.
        collectives: collectives of tensor and expert parallelism in these.
        attention: core attention of whole documents, if all ranks had equal shares.
        launches: launches of kernels, and the half of a matrix product's last wave that is idle.
        copies: rows that are gathered, reordered and added up around exchanges.
        interference: compute that exchanges slow down.
        exchanges: exchanges, messages between stages and the reduction of gradients, as far as
            nothing hides them.
        waiting: the rest: imbalance, bubbles, cut documents, and latents that are expanded.
    """

    linear: float
    collectives: float
    attention: float
    launches: float
    copies: float
    interference: float
    exchanges: float
    waiting: float

    @property
    def seconds(self) -> float:
        """Seconds of the iteration."""
        return float(sum(asdict(self).values()))

    def scaled(self, factor: float) -> Breakdown:
        """Returns the parts of an iteration that takes `factor` times as long."""
        return Breakdown(**{name: factor * each for name, each in asdict(self).items()})

    def as_shown(self) -> dict[str, float]:
        """Returns the parts by name. None is negative, and their sum is the iteration.

        What is below 0 is taken from the largest costs beside the linear layers and attention.
        """
        # Of -0.0 and 0.0 `max` returns the first.
        parts = {name: max(0.0, each) for name, each in asdict(self).items()}
        surplus = sum(parts.values()) - self.seconds
        order = sorted(parts, key=lambda name: (name in _WORK, -parts[name]))
        for name in order:
            taken = min(surplus, parts[name])
            parts[name] -= taken
            surplus -= taken
        return parts

    def less_for_a_percent(self) -> dict[str, float]:
        """Returns, of each cost beside the linear layers and attention, which share of it would
        have to go for an iteration that is 1% shorter; those that have less are left out."""
        wanted = 0.01 * self.seconds
        costs = {name: each for name, each in asdict(self).items() if name not in _WORK}
        return {name: wanted / each for name, each in costs.items() if each > wanted}


def break_down(candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]) -> Breakdown:
    """Says what an iteration's time is spent on.

    Args:
        candidate: system and parallel sizes.
        workload: model, cluster and sizes.
        sequences: lengths of the documents in each sequence, int64.

    Raises:
        BufferBoundError: no plan keeps to the configuration's bound of buffers.
    """
    return simulate_and_break_down(candidate, workload, sequences)[1]


def simulate_and_break_down(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]
) -> tuple[Outcome, Breakdown]:
    """Simulates a global batch as `simulate` does, and breaks its time down as `break_down` does:
    plans are made once.

    Raises:
        BufferBoundError: no plan keeps to the configuration's bound of buffers.
    """
    return break_down_runs(_runner(candidate, workload, sequences), candidate, workload, sequences)


def break_down_runs(
    run: Callable[[ModelCosts], Outcome],
    candidate: Candidate,
    workload: Workload,
    sequences: Sequence[Int64s],
) -> tuple[Outcome, Breakdown]:
    """Does the same with an iteration that a function simulates, with the costs that it takes."""
    costs = workload.costs_of(candidate)
    if candidate.system in BASELINES:
        costs = workload.costs(candidate.tensor)
    outcome, parts = in_parts(
        run,
        costs,
        lambda costs: _linear_seconds(candidate, workload, costs),
        _attention_seconds(candidate, workload, costs, sequences),
    )
    # Padding of server pools trains nothing.
    return replace(outcome, tokens=workload.sequences * workload.context), parts


def in_parts(
    run: Callable[[ModelCosts], Outcome],
    costs: ModelCosts,
    linear_seconds: Callable[[ModelCosts], float],
    attention: float,
) -> tuple[Outcome, Breakdown]:
    """Simulates an iteration with its costs, and with one after the other free.

    Args:
        run: simulates the iteration with other costs.
        costs: its costs.
        linear_seconds: seconds of all layers but core attention on the mean rank, by the costs.
        attention: seconds of core attention on the mean rank.
    """
    cluster = costs.cluster
    still = replace(cluster, charges=replace(cluster.charges, interference=0.0))
    unlinked = replace(
        still,
        node_gb_per_s=_FREE_GB_PER_S,
        network_gb_per_s=_FREE_GB_PER_S,
        node_latency=0.0,
        network_latency=0.0,
    )
    uncopied = replace(unlinked, copy_gb_per_s=_FREE_GB_PER_S)
    unlaunched = replace(
        uncopied, launch_seconds=0.0, charges=replace(uncopied.charges, half_waves=False)
    )
    outcome = run(costs)
    seconds = [outcome.seconds]
    for each in (still, unlinked, uncopied, unlaunched):
        seconds.append(run(replace(costs, cluster=each)).seconds)
    with_links, linear = (
        linear_seconds(replace(costs, cluster=each)) for each in (cluster, unlinked)
    )
    interference, links, copies, launches = (-np.diff(seconds)).tolist()
    collectives = with_links - linear
    # The slowest rank may have fewer collectives than the mean one.
    exchanges = max(links - collectives, 0.0)
    parts = Breakdown(
        linear,
        collectives,
        attention,
        launches,
        copies,
        interference,
        exchanges,
        seconds[-1] + links - exchanges - collectives - linear - attention,
    )
    return outcome, parts


def _runner(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]
) -> Callable[[ModelCosts], Outcome]:
    """Returns a function that simulates the iteration with the costs that it takes."""
    if candidate.system in BASELINES:
        lengths = np.concatenate(sequences)
        if candidate.system == HYBRID:
            ranks, shape = (
                candidate.data * candidate.context,
                workload.costs(candidate.tensor).shape,
            )
            rounds = plan_hybrid(lengths, ranks, candidate.context, shape)

            def run(costs: ModelCosts) -> Outcome:
                attention = costs.cluster.attention_cost(costs.shape)
                attention = LayerMean.of(attention, costs.model)
                return simulate_hybrid(lengths, ranks, rounds, costs, attention)

            return run

        def pack_and_run(costs: ModelCosts) -> Outcome:
            return simulate_baseline(candidate.system, lengths, layout_of(candidate), costs)

        return pack_and_run
    planned = planner_of(candidate, workload).plan(incoming_of(candidate, workload, sequences))
    backward: BackwardInputs = "keep" if candidate.keeps_inputs else "resend"
    return partial(simulate_ticks, planned, backward=backward)


def _ranks(candidate: Candidate) -> int:
    return candidate.stages * candidate.data * candidate.context


def _linear_seconds(candidate: Candidate, workload: Workload, costs: ModelCosts) -> float:
    """Returns the seconds of all layers but core attention on the mean rank."""
    each = workload.model.layers * float(costs.passes @ costs.layer_seconds())
    each += sum(costs.head_seconds())
    return workload.sequences * workload.context * each / _ranks(candidate)


def _attention_seconds(
    candidate: Candidate, workload: Workload, costs: ModelCosts, sequences: Sequence[Int64s]
) -> float:
    """Returns the seconds of whole documents' core attention on the mean rank."""
    kernel = LayerMean.of(costs.cluster.attention_cost(costs.shape), workload.model)
    loads = float(document_loads(np.concatenate(sequences), Mask(), kernel).sum())
    both_ways = float(costs.passes @ [1, costs.cluster.backward_over_forward])
    servers = _ranks(candidate) // candidate.head_parallel
    return workload.model.layers * both_ways * loads / servers
