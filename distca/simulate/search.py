"""Candidates for the best parallel configuration of a workload, and the simulation of each.

A workload's documents come packed in sequences of equal length, as in every pretraining job, so
that all configurations train on the same documents: none is cut where micro-batches end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from distca.cost.latent_rows import LatentRows, travelling_shape
from distca.cost.model_sizes import ModelSize
from distca.cost.volume import MAX_HEAD_GROUPS
from distca.plan import BLOCK
from distca.plan.span import Int64s, distinct
from distca.schedule import ExecutionOptions, LinearWork, ScheduleConfig, most_in_flight_of_1f1b
from distca.schedule.program import Ablation
from distca.simulate.baselines import BASELINES, WITHOUT_WINDOWS, simulate_baseline
from distca.simulate.batches import plan_global_batch
from distca.simulate.bins import GATHERED, PACKED_BY_WORK, BaselineLayout, keeps
from distca.simulate.cluster import Cluster
from distca.simulate.costs import ModelCosts, Recompute
from distca.simulate.hybrid import HYBRID
from distca.simulate.outcome import Outcome
from distca.simulate.ticks import simulate_ticks

DISTCA_SYSTEMS = {
    # The paper's scheduler: documents are placed one after the other (Section 6.1).
    "greedy": partial(ExecutionOptions, "greedy", free_placement=False),
    "tiles": partial(ExecutionOptions, "tiles"),
}
"""Options of the systems with `--distca`, by name."""
SYSTEMS = (*BASELINES, *DISTCA_SYSTEMS)
_CHAINS = (2, 4)
"""Lengths of the chains of micro-batches that are tried."""
_MOST_BINS = 16
"""Bound on WLB-LLM's bins for each sequence of a global batch: the work of the longest documents is
many times that of smaller bins."""


@dataclass(frozen=True)
class Workload:
    """What is to be simulated: a model, GPUs of a cluster and a global batch.

    Attributes:
        model: sizes of the model.
        cluster: nodes and links.
        gpus: number of the cluster's GPUs that train.
        context: tokens of a sequence; no document is longer.
        sequences: number of sequences in a global batch.
        tolerance: relative imbalance of servers' loads that schedulers may leave.
        recompute: value of `ModelCosts.recompute`.
        expert_parallel: GPUs of a stage that share each layer's routed experts, in all systems.
        latent_rows: what travels to servers for keys and values of latent attention.

    Raises:
        ValueError: a size is below 1, or the experts don't divide.
    """

    model: ModelSize
    cluster: Cluster
    gpus: int
    context: int
    sequences: int
    tolerance: float = 0.1
    recompute: Recompute = "none"
    expert_parallel: int = 1
    latent_rows: LatentRows = "auto"

    def costs(self, tensor_parallel: int) -> ModelCosts:
        """Costs of the model on the cluster."""
        return ModelCosts(
            self.model,
            self.cluster,
            tensor_parallel,
            recompute=self.recompute,
            expert_parallel=self.expert_parallel,
        )

    def costs_of(self, candidate: Candidate) -> ModelCosts:
        """Costs of the model with what travels in a configuration with `--distca`.

        Servers of other stages have not the weights to expand latents by, and head groups would
        each have them sent again.

        Raises:
            ValueError: latents must travel, and the model has none.
        """
        costs = self.costs(candidate.tensor)
        alone = candidate.stages == candidate.head_groups == 1 and candidate.may_send_latents
        shape = travelling_shape(
            self.model,
            candidate.tensor,
            costs.dtype_bytes,
            self.cluster.links(candidate.tensor),
            candidate.data,
            self.latent_rows,
            self.cluster.peak_tflops * 1e12 * self.cluster.linear_mfu,
        )
        return replace(costs, sends_latents=alone and shape.kv_rank is not None)

    def __post_init__(self) -> None:
        for name in ("gpus", "context", "sequences", "expert_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{getattr(self, name)} {name}: there must be at least 1")
        experts = self.model.experts
        if self.expert_parallel > 1 and (experts is None or experts.number % self.expert_parallel):
            raise ValueError(
                f"{self.expert_parallel} GPUs cannot share "
                + (f"{experts.number} experts evenly" if experts else "experts: there are none")
            )


@dataclass(frozen=True)
class Candidate:
    """A system and its parallel configuration; GPUs are the product of the four sizes.

    Attributes:
        system: one of `SYSTEMS`.
        tensor: GPUs that share each layer.
        stages: number of pipeline stages.
        data: number of replicas; with `--distca`, of data-parallel ranks.
        context: ranks of a context-parallel group; 1 with `--distca`.
        micro_batches: number of micro-batches of each replica.
        max_in_flight: bound on a stage's micro-batches in flight, with `--distca`; None: no bound.
        tolerance: imbalance of servers' loads, with `--distca`; None: the workload's.
        head_groups: value of `--distca-head-groups`.
        may_send_latents: whether latents travel to servers where they can, with `--distca`, and the
            workload lets them; else keys and values do.
        chain: micro-batches that share documents, with `--distca`.
        keeps_inputs: whether servers keep the kernels' inputs for the backward pass, with
            `--distca`; else they are sent again.
        all_to_all: neighbouring ranks of a context-parallel group that share heads; the others form
            rings.
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
    may_send_latents: bool = True
    chain: int = 1
    keeps_inputs: bool = False
    all_to_all: int = 1

    def __str__(self) -> str:
        sizes = f"TP{self.tensor} PP{self.stages} DP{self.data}"
        sizes += f" CP{self.context}" if self.context > 1 else ""
        sizes += f" ({self.all_to_all} by a2a)" if 1 < self.all_to_all < self.context else ""
        bound = f", {self.max_in_flight} in flight" if self.max_in_flight is not None else ""
        bound += f", tolerance {self.tolerance}" if self.tolerance is not None else ""
        bound += f", {self.head_groups} head groups" if self.head_groups > 1 else ""
        bound += "" if self.may_send_latents else ", no latents"
        bound += f", in chains of {self.chain}" if self.chain > 1 else ""
        bound += ", inputs kept" if self.keeps_inputs else ""
        return f"{sizes}, {self.micro_batches} micro-batch(es){bound}"


def pack_sequences(lengths: Int64s, sequences: int, context: int) -> list[Int64s]:
    """Packs documents one after the other in sequences, and cuts them where sequences end.

    Args:
        lengths: tokens of each document, int64; `sequences * context` in all.
        sequences: number of sequences.
        context: tokens of a sequence.

    Raises:
        ValueError: the documents have another number of tokens.
    """
    if int(lengths.sum()) != sequences * context:
        raise ValueError(
            f"documents of {int(lengths.sum()):,} tokens do not fill {sequences} sequences of "
            f"{context:,}"
        )
    edges = distinct(np.concatenate([np.cumsum(lengths), np.arange(1, sequences + 1) * context]))
    pieces = np.diff(edges, prepend=0)
    number = (edges - 1) // context
    return [pieces[number == n] for n in range(sequences)]


def divisions(
    system: str,
    workload: Workload,
    tensor: Sequence[int],
    stages: Sequence[int],
    most_micro_batches: int = 256,
) -> list[Candidate]:
    """Lists all configurations that divide the workload, whether they fit in memory or not.

    Args:
        system: one of `SYSTEMS`.
        workload: model, cluster and sizes.
        tensor: tensor-parallel sizes.
        stages: pipeline sizes.
        most_micro_batches: bound on the micro-batches of a replica.

    Raises:
        ValueError: there is no such system.
    """
    if system not in SYSTEMS:
        raise ValueError(f"no system {system!r}: choose from {', '.join(SYSTEMS)}")
    found = []
    for tp in tensor:
        servers = workload.gpus // tp
        for pp in stages:
            if not _divides(tp, workload) or servers % pp or workload.model.layers % pp:
                continue
            if servers // pp * tp % workload.expert_parallel:
                continue
            if pp > 1 and workload.model.layers // pp % len(workload.model.masks.pattern):
                # The stages' layers would have different masks.
                continue
            if system in WITHOUT_WINDOWS and not workload.model.sees_all:
                continue
            if system == HYBRID and (pp > 1 or servers % 2):
                continue
            groups = _divisors(servers // pp) if system in BASELINES[1:] else [1]
            # WLB-LLM's bins hold documents of any sequence, so they may be smaller than one.
            most = workload.sequences * (_MOST_BINS if system in PACKED_BY_WORK else 1)
            heads = workload.model.kv_heads // tp
            found += [
                Candidate(system, tp, pp, servers // pp // cp, cp, number, all_to_all=apart)
                for cp in groups
                for apart in _all_to_alls(system, cp, heads)
                for number in _divisors(most)
                # Fewer micro-batches than stages leave most of a pipeline idle.
                if number <= most_micro_batches and (pp == 1 or number >= pp)
                if _fills(system, workload, pp, servers // pp // cp, cp, number)
            ]
    if system == "wlb-llm-paper" and tuple(stages) == (1,):
        # The authors' sweeps without pipelines go down from 32 ranks, and stop after two sizes.
        sizes = sorted({c.context for c in found if c.context <= 32})[-2:]
        found = [c for c in found if c.context in sizes]
    return found


def _all_to_alls(system: str, context: int, heads: int) -> list[int]:
    """Sizes of all-to-alls in a group of `context` ranks; none where the system has no such group.

    Args:
        system: one of `SYSTEMS`.
        context: ranks of the group.
        heads: key-value heads of a GPU, which the size must divide.
    """
    sizes = [n for n in _divisors(context) if heads % n == 0]
    if system == "cp-a2a":
        return [n for n in sizes if n == context]
    if system == "cp-a2a+p2p":
        return [n for n in sizes if 1 < n < context]
    return [1]


def _fills(
    system: str, workload: Workload, stages: int, data: int, context: int, micro_batches: int
) -> bool:
    """Whether the batch's sequences fill the micro-batches of all ranks evenly."""
    if system in DISTCA_SYSTEMS:
        return workload.sequences // micro_batches * workload.context % (2 * data) == 0
    if workload.sequences * workload.context % (data * context * micro_batches):
        return False
    if system == HYBRID:
        # `context` is how many ranks the longest document has: a power of two.
        return micro_batches == 1 and context & (context - 1) == 0
    if system == "wlb-llm-paper":
        # At most one bin a sequence, and one micro-batch without a pipeline.
        return data * micro_batches <= workload.sequences and (stages > 1 or micro_batches == 1)
    if system in PACKED_BY_WORK:
        return data * micro_batches <= _MOST_BINS * workload.sequences
    return workload.sequences % (data * micro_batches) == 0


def candidates(
    system: str,
    workload: Workload,
    tensor: Sequence[int],
    stages: Sequence[int],
    most_micro_batches: int = 256,
) -> list[Candidate]:
    """Lists the configurations of `divisions` that may fit in memory.

    A configuration with `--distca` that does not fit is tried with 1F1B's bound of micro-batches in
    flight.
    """
    found = []
    for candidate in divisions(system, workload, tensor, stages, most_micro_batches):
        tried = [candidate, *with_fewer_in_flight(candidate)]
        usable = workload.cluster.usable_bytes
        found += [each for each in tried if least_memory(each, workload) <= usable][:1]
    return found


def with_fewer_in_flight(candidate: Candidate) -> list[Candidate]:
    """The configuration with 1F1B's bound of micro-batches in flight; none if that is no change."""
    if (
        candidate.system not in DISTCA_SYSTEMS
        or candidate.stages == 1
        or candidate.max_in_flight is not None
    ):
        return []
    return [replace(candidate, max_in_flight=candidate.stages)]


def without_latents(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """The configuration with keys and values that travel, if latents do and need not.

    Latents are fewer bytes, so that plans send them to more servers, which expand them: in all that
    takes more products and memory.
    """
    if candidate.system not in DISTCA_SYSTEMS or workload.latent_rows != "auto":
        return []
    if not workload.costs_of(candidate).sends_latents:
        return []
    return [replace(candidate, may_send_latents=False)]


def with_less_memory(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Substitutes for a configuration that does not fit."""
    return [*without_latents(candidate, workload), *with_fewer_in_flight(candidate)]


def with_head_groups(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """The configuration with each number of head groups that training allows, fewest first."""
    heads = workload.model.kv_heads // candidate.tensor
    return [replace(candidate, head_groups=n) for n in _divisors(heads) if 1 < n <= MAX_HEAD_GROUPS]


def with_chains(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """The configuration with smaller micro-batches that share documents, longest chains last.

    Without a pipeline they are no use, and as in training each rank has whole attention blocks.
    """
    tokens = workload.sequences * workload.context // candidate.micro_batches // candidate.data
    if candidate.stages == 1:
        return []
    return [
        replace(
            candidate,
            chain=chain,
            micro_batches=candidate.micro_batches * chain,
            max_in_flight=None,
        )
        for chain in _CHAINS
        if tokens % (chain * math.lcm(BLOCK, 2 * candidate.tensor)) == 0
    ]


def with_kept_inputs(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """The configuration with servers that keep the kernels' inputs for the backward pass.

    Training can in one stage without chains. Layers that run forward again would take them twice,
    and latents are expanded again at any rate.
    """
    alone = candidate.stages == candidate.chain == 1 and workload.recompute != "full"
    if candidate.system not in DISTCA_SYSTEMS or not alone:
        return []
    if workload.costs_of(candidate).sends_latents:
        return []
    return [replace(candidate, keeps_inputs=True)]


def options_of(candidate: Candidate) -> ExecutionOptions:
    """Returns the options of a configuration with `--distca`."""
    return DISTCA_SYSTEMS[candidate.system](
        max_in_flight=candidate.max_in_flight, chain=candidate.chain
    )


def _divides(tp: int, workload: Workload) -> bool:
    """Whether a tensor-parallel size divides nodes, heads and GPUs."""
    return not (
        workload.cluster.gpus_per_node % tp
        or workload.gpus % tp
        or workload.model.heads % tp
        or workload.model.kv_heads % tp
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def least_memory(candidate: Candidate, workload: Workload) -> float:
    """Lower bound of a first-stage GPU's memory in bytes: without buffers and imbalance."""
    costs = workload.costs(candidate.tensor)
    in_flight = most_in_flight_of_1f1b(candidate.micro_batches, candidate.stages)[0]
    if candidate.system in DISTCA_SYSTEMS:
        options = options_of(candidate)
        in_flight = options.tick_schedule(candidate.micro_batches, candidate.stages).most_in_flight[
            0
        ]
    tokens = (
        workload.sequences
        * workload.context
        / (candidate.data * candidate.context * candidate.micro_batches)
    )
    kept = tokens * costs.activation_bytes()
    if candidate.system in GATHERED:
        others = max(keeps(candidate.system, costs) * candidate.context - 1, 0)
        kept += tokens * others * costs.shape.kv_row_bytes
    if candidate.system == HYBRID:
        # Rounds keep one document, of which the batch may have none as long as a sequence.
        kept = 0.0
    layers = workload.model.layers // candidate.stages
    return in_flight * layers * kept + costs.state_bytes(
        0, candidate.stages, candidate.data * candidate.context
    )


def simulate(
    candidate: Candidate,
    workload: Workload,
    sequences: Sequence[Int64s],
    ablation: Ablation = "none",
    recording: bool = False,
) -> Outcome:
    """Simulates a global batch in a configuration.

    Args:
        candidate: system and parallel sizes.
        workload: model, cluster and sizes.
        sequences: lengths of the documents in each sequence, int64.
        ablation: part of the exchanges that is left out, with `--distca`.
        recording: keep spans for a trace.

    Raises:
        ValueError: the sequences are not the workload's, or the configuration does not divide.
    """
    if len(sequences) != workload.sequences or any(
        int(s.sum()) != workload.context for s in sequences
    ):
        raise ValueError(f"give {workload.sequences} sequences of {workload.context:,} tokens each")
    costs = workload.costs(candidate.tensor)
    if candidate.system in BASELINES:
        layout = BaselineLayout(
            candidate.stages,
            candidate.data,
            candidate.context,
            candidate.micro_batches,
            candidate.all_to_all,
        )
        lengths = np.concatenate(sequences)
        return simulate_baseline(candidate.system, lengths, layout, costs, recording=recording)
    costs = workload.costs_of(candidate)
    config = ScheduleConfig(
        tolerance=workload.tolerance if candidate.tolerance is None else candidate.tolerance,
        shape=costs.travelling_shape,
        cost_model=costs.cluster.attention_cost(costs.shape),
        links=costs.cluster.links(candidate.tensor),
    )
    count = candidate.micro_batches // candidate.chain
    each = workload.sequences // count
    windows = [np.concatenate(sequences[n * each : (n + 1) * each]) for n in range(count)]
    options = options_of(candidate)
    model = workload.model
    linear_work = LinearWork.of_parameters(
        model.layer_parameters,
        model.vocabulary_parameters,
        model.layers // candidate.stages,
        model.heads * (model.head_dim + model.value_dim) // 2,
    )
    sizes = candidate.stages, candidate.data
    planned = plan_global_batch(windows, *sizes, config, options, model.masks, linear_work)
    return simulate_ticks(
        planned,
        costs,
        ablation=ablation,
        recording=recording,
        head_groups=candidate.head_groups,
        backward="keep" if candidate.keeps_inputs else "resend",
    )
