"""Which parallel configuration is best for a job: candidates, and what each comes to.

A job's documents come packed in sequences of equal length, as every pretraining job packs them, so
that all configurations train on the same documents: none is cut where micro-batches end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from distca.cost.models import ModelSize
from distca.plan.span import Int64s
from distca.schedule import ScheduleConfig, most_in_flight_of_1f1b
from distca.simulate.baselines import BASELINES, BaselineLayout, simulate_baseline
from distca.simulate.batches import Way, plan_batch
from distca.simulate.cluster import Cluster
from distca.simulate.costs import ModelCosts
from distca.simulate.outcome import Outcome
from distca.simulate.ticks import Ablation, simulate_ticks

WAYS = {
    # The paper's: documents are placed one after the other (Section 6.1).
    "greedy": partial(Way, "greedy", free_placement=False),
    "tiles": partial(Way, "tiles"),
}
"""With `--distca`, by name."""
SYSTEMS = (*BASELINES, *WAYS)


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on what.

    Attributes:
        model: its sizes.
        cluster: its nodes.
        gpus: how many of its GPUs.
        context: tokens of a sequence; no document is longer.
        sequences: of a global batch.
        tolerance: of servers' loads.
    """

    model: ModelSize
    cluster: Cluster
    gpus: int
    context: int
    sequences: int
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        for name in ("gpus", "context", "sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{getattr(self, name)} {name}: there must be at least 1")


@dataclass(frozen=True)
class Candidate:
    """A system and its parallel configuration; GPUs are the product of the four sizes.

    Attributes:
        system: one of `SYSTEMS`.
        tensor: GPUs that share each layer.
        stages: of the pipeline.
        data: replicas; with `--distca`, data-parallel ranks.
        context: ranks of a context-parallel group; 1 with `--distca`.
        micro_batches: of each replica.
        max_in_flight: of a stage with `--distca`; None: no bound.
        tolerance: of servers' loads, with `--distca`; None: the job's.
    """

    system: str
    tensor: int
    stages: int
    data: int
    context: int
    micro_batches: int
    max_in_flight: int | None = None
    tolerance: float | None = None

    def __str__(self) -> str:
        sizes = f"TP{self.tensor} PP{self.stages} DP{self.data}"
        sizes += f" CP{self.context}" if self.context > 1 else ""
        bound = f", {self.max_in_flight} in flight" if self.max_in_flight is not None else ""
        bound += f", tolerance {self.tolerance}" if self.tolerance is not None else ""
        return f"{sizes}, {self.micro_batches} micro-batch(es){bound}"


def candidates(
    system: str,
    job: Job,
    tensor: Sequence[int],
    stages: Sequence[int],
    most_micro_batches: int = 64,
) -> list[Candidate]:
    """Configurations that divide the job and may fit in memory.

    Args:
        system: one of `SYSTEMS`.
        job: what is trained.
        tensor: tensor-parallel sizes.
        stages: pipeline sizes.
        most_micro_batches: of a replica.

    Raises:
        ValueError: there is no such system.
    """
    if system not in SYSTEMS:
        raise ValueError(f"no system {system!r}: choose from {', '.join(SYSTEMS)}")
    found = []
    for tp in tensor:
        if not _divides(tp, job):
            continue
        for pp in stages:
            servers = job.gpus // tp
            if servers % pp or job.model.layers % pp:
                continue
            for cp in _divisors(servers // pp) if system in BASELINES[1:] else [1]:
                data = servers // pp // cp
                for number in _divisors(job.sequences):
                    if number > most_micro_batches or (pp > 1 and number < pp):
                        continue
                    if system in BASELINES:
                        # WLB-LLM's bins hold whole documents of any sequence.
                        whole = job.sequences * (1 if system != "wlb-llm" else job.context // cp)
                        if whole % (data * number):
                            continue
                        found.append(Candidate(system, tp, pp, data, cp, number))
                        continue
                    if job.sequences * job.context // number % (2 * data):
                        continue
                    free = Candidate(system, tp, pp, data, 1, number)
                    found.append(free)
                    if pp > 1 and least_memory(free, job) > job.cluster.usable_bytes:
                        # As much in flight as 1F1B has, for more ticks.
                        found[-1] = Candidate(system, tp, pp, data, 1, number, pp)
    return [each for each in found if least_memory(each, job) <= job.cluster.usable_bytes]


def _divides(tp: int, job: Job) -> bool:
    """Whether a tensor-parallel size divides nodes, heads and GPUs."""
    return not (
        job.cluster.gpus_per_node % tp
        or job.gpus % tp
        or job.model.heads % tp
        or job.model.kv_heads % tp
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def least_memory(candidate: Candidate, job: Job) -> float:
    """What a GPU of the first stage needs at least, bytes: without buffers and imbalance."""
    c = candidate
    costs = ModelCosts(job.model, job.cluster, c.tensor)
    in_flight = most_in_flight_of_1f1b(c.micro_batches, c.stages)[0]
    if c.system in WAYS:
        way = WAYS[c.system](max_in_flight=c.max_in_flight)
        in_flight = way.ticks(c.micro_batches, c.stages).most_in_flight[0]
    tokens = job.sequences * job.context / (c.data * c.context * c.micro_batches)
    kept = tokens * costs.activation_bytes()
    kept += tokens * (c.context - 1) * costs.shape.kv_row_bytes
    layers = job.model.layers // c.stages
    return in_flight * layers * kept + costs.state_bytes(0, c.stages, c.data * c.context)


def simulate(
    candidate: Candidate,
    job: Job,
    sequences: Sequence[Int64s],
    ablation: Ablation = "none",
    recording: bool = False,
) -> Outcome:
    """Runs a global batch in a configuration.

    Args:
        candidate: the configuration.
        job: what is trained.
        sequences: of each sequence the lengths of its documents, int64.
        ablation: with `--distca`, see `simulate_ticks`.
        recording: keep spans for a trace.

    Raises:
        ValueError: the sequences are not the job's, or the configuration does not divide.
    """
    c = candidate
    if len(sequences) != job.sequences or any(int(s.sum()) != job.context for s in sequences):
        raise ValueError(f"give {job.sequences} sequences of {job.context:,} tokens each")
    costs = ModelCosts(job.model, job.cluster, c.tensor)
    if c.system in BASELINES:
        layout = BaselineLayout(c.stages, c.data, c.context, c.micro_batches)
        lengths = np.concatenate(sequences)
        return simulate_baseline(c.system, lengths, layout, costs, recording=recording)
    config = ScheduleConfig(
        tolerance=job.tolerance if c.tolerance is None else c.tolerance,
        shape=costs.shape,
        cost_model=costs.cluster.attention_cost(costs.shape),
        links=costs.cluster.links(c.tensor),
    )
    each = job.sequences // c.micro_batches
    windows = [np.concatenate(sequences[n * each : (n + 1) * each]) for n in range(c.micro_batches)]
    way = WAYS[c.system](max_in_flight=c.max_in_flight)
    planned = plan_batch(windows, c.stages, c.data, config, way)
    return simulate_ticks(planned, costs, ablation=ablation, recording=recording)
