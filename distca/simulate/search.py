"""Which parallel configuration is best for a job: candidates, and what each comes to.

A job's documents come packed in sequences of equal length, as every pretraining job packs them, so
that all configurations train on the same documents: none is cut where micro-batches end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from distca.cost.models import ModelSize
from distca.plan.span import Int64s
from distca.schedule import ScheduleConfig, most_in_flight_of_1f1b
from distca.simulate.baselines import BASELINES, simulate_baseline
from distca.simulate.batches import Way, plan_batch
from distca.simulate.bins import BaselineLayout
from distca.simulate.cluster import Cluster
from distca.simulate.costs import ModelCosts
from distca.simulate.outcome import Outcome
from distca.simulate.ticks import Ablation, simulate_ticks
from distca.transport.channels import MAX_HEAD_GROUPS

WAYS = {
    # The paper's: documents are placed one after the other (Section 6.1).
    "greedy": partial(Way, "greedy", free_placement=False),
    "tiles": partial(Way, "tiles"),
}
"""With `--distca`, by name."""
SYSTEMS = (*BASELINES, *WAYS)
_MOST_BINS = 16
"""Of WLB-LLM for each sequence of a global batch: of smaller ones the longest documents are many
times the work."""


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
        head_groups: `--distca-head-groups`.
    """

    system: str
    tensor: int
    stages: int
    data: int
    context: int
    micro_batches: int
    max_in_flight: int | None = None
    tolerance: float | None = None
    head_groups: int = 1

    def __str__(self) -> str:
        sizes = f"TP{self.tensor} PP{self.stages} DP{self.data}"
        sizes += f" CP{self.context}" if self.context > 1 else ""
        bound = f", {self.max_in_flight} in flight" if self.max_in_flight is not None else ""
        bound += f", tolerance {self.tolerance}" if self.tolerance is not None else ""
        bound += f", {self.head_groups} head groups" if self.head_groups > 1 else ""
        return f"{sizes}, {self.micro_batches} micro-batch(es){bound}"


def pack_sequences(lengths: Int64s, sequences: int, context: int) -> list[Int64s]:
    """Documents one after the other in sequences, cut where these end.

    Args:
        lengths: tokens of each document, int64; `sequences * context` in all.
        sequences: how many.
        context: tokens of each.

    Raises:
        ValueError: the documents have another number of tokens.
    """
    if int(lengths.sum()) != sequences * context:
        raise ValueError(
            f"documents of {int(lengths.sum()):,} tokens do not fill {sequences} sequences of "
            f"{context:,}"
        )
    edges = np.union1d(np.cumsum(lengths), np.arange(1, sequences + 1) * context)
    pieces = np.diff(edges, prepend=0)
    number = (edges - 1) // context
    return [pieces[number == n] for n in range(sequences)]


def divisions(
    system: str,
    job: Job,
    tensor: Sequence[int],
    stages: Sequence[int],
    most_micro_batches: int = 256,
) -> list[Candidate]:
    """All configurations that divide the job, whether they fit in memory or not.

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
        servers = job.gpus // tp
        for pp in stages:
            if not _divides(tp, job) or servers % pp or job.model.layers % pp:
                continue
            groups = _divisors(servers // pp) if system in BASELINES[1:] else [1]
            # WLB-LLM's bins hold whole documents of any sequence, so they may be smaller than one.
            most = job.sequences * (_MOST_BINS if system == "wlb-llm" else 1)
            found += [
                Candidate(system, tp, pp, servers // pp // cp, cp, number)
                for cp in groups
                for number in _divisors(most)
                # Fewer micro-batches than stages leave most of a pipeline idle.
                if number <= most_micro_batches and (pp == 1 or number >= pp)
                if _fills(system, job, servers // pp // cp, cp, number)
            ]
    return found


def _fills(system: str, job: Job, data: int, context: int, micro_batches: int) -> bool:
    """Whether the batch's sequences divide: see `Candidate`."""
    if system in WAYS:
        return job.sequences // micro_batches * job.context % (2 * data) == 0
    if job.sequences * job.context % (data * context * micro_batches):
        return False
    if system == "wlb-llm":
        return data * micro_batches <= _MOST_BINS * job.sequences
    return job.sequences % (data * micro_batches) == 0


def candidates(
    system: str,
    job: Job,
    tensor: Sequence[int],
    stages: Sequence[int],
    most_micro_batches: int = 256,
) -> list[Candidate]:
    """The configurations of `divisions` that may fit in memory.

    With `--distca` one that does not is tried with as many micro-batches in flight as 1F1B has.
    """
    found = []
    for candidate in divisions(system, job, tensor, stages, most_micro_batches):
        tried = [candidate, *with_fewer_in_flight(candidate)]
        usable = job.cluster.usable_bytes
        found += [each for each in tried if least_memory(each, job) <= usable][:1]
    return found


def with_fewer_in_flight(candidate: Candidate) -> list[Candidate]:
    """The same with as many micro-batches in flight as 1F1B has, if it has more; or nothing."""
    if candidate.system not in WAYS or candidate.stages == 1 or candidate.max_in_flight is not None:
        return []
    return [replace(candidate, max_in_flight=candidate.stages)]


def with_head_groups(candidate: Candidate, job: Job) -> list[Candidate]:
    """The same with two or more head groups, as many as training allows, fewer first."""
    heads = job.model.kv_heads // candidate.tensor
    return [replace(candidate, head_groups=n) for n in _divisors(heads) if 1 < n <= MAX_HEAD_GROUPS]


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
    return simulate_ticks(
        planned, costs, ablation=ablation, recording=recording, head_groups=c.head_groups
    )
