"""A training job to simulate: a workload, a configuration of it, and their iteration.

A workload's documents come packed in sequences of equal length, as in every pretraining job, so
that all configurations train on the same documents: none is cut where micro-batches end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from distca.cost.latent_rows import LatentRows, comm_shape
from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.training_memory import Recompute
from distca.plan import LayerMasks
from distca.plan.span import Int64s, distinct
from distca.schedule import (
    Documents,
    ExecutionOptions,
    GlobalBatchPlanner,
    LinearWork,
    PlannedGlobalBatch,
    ScheduleConfig,
    documents_in_turn,
)
from distca.schedule.program import Ablation
from distca.schedule.training.tick_speeds import load_of_a_pair
from distca.simulate.baselines import BASELINES, simulate_baseline
from distca.simulate.bins import BaselineLayout
from distca.simulate.cluster import Cluster
from distca.simulate.costs import ModelCosts
from distca.simulate.disaggregated import simulate_ticks
from distca.simulate.outcome import Outcome

DISTCA_SYSTEMS = {
    # The paper's scheduler: documents are placed one after the other (Section 6.1).
    "greedy": partial(ExecutionOptions, "greedy", free_placement=False),
    "tiles": partial(ExecutionOptions, "tiles"),
}
"""Options of the systems with `--distca`, by name."""
SYSTEMS = (*BASELINES, *DISTCA_SYSTEMS)


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

        Servers of other stages have not the weights to expand latents by.

        Raises:
            ValueError: latents must travel, and the model has none.
        """
        costs = replace(self.costs(candidate.tensor), head_parallel=candidate.head_parallel)
        if candidate.head_parallel > 1:
            # A latent makes the keys of all heads.
            return costs
        alone = candidate.stages == 1 and candidate.may_send_latents
        shape = comm_shape(
            self.model,
            candidate.tensor,
            costs.dtype_bytes,
            self.cluster.links(candidate.tensor),
            candidate.data,
            self.latent_rows,
            self.cluster.peak_tflops * 1e12 * self.cluster.linear_mfu,
        )
        return replace(costs, sends_latents=alone and shape.kv_rank is not None)

    @property
    def may_share_more(self) -> bool:
        """Whether more GPUs than `expert_parallel` could share the experts evenly."""
        experts = self.model.experts
        return experts is not None and self.expert_parallel < math.gcd(experts.number, self.gpus)

    def planned_links(self, candidate: Candidate) -> Links:
        """Returns the links by which a configuration with `--distca` is planned."""
        links = self.cluster.links(candidate.tensor * candidate.head_parallel)
        return replace(links, network_gb_per_s=links.network_gb_per_s / candidate.network_divisor)

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


def experts_of_a_node(model: ModelSize, cluster: Cluster, gpus: int) -> int:
    """Returns how many GPUs share experts where nothing else is asked for.

    These are as many of a node as divide the experts, so that no token's row leaves its node; 1 for
    a model without experts.
    """
    experts = model.experts
    return 1 if experts is None else math.gcd(experts.number, cluster.gpus_per_node, gpus)


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
        may_send_latents: whether latents travel to servers where they can, with `--distca`, and the
            workload lets them; else keys and values do.
        chain: micro-batches that share documents, with `--distca`.
        keeps_inputs: whether servers keep the kernels' inputs for the backward pass, with
            `--distca`; else they are sent again.
        all_to_all: neighbouring ranks of a context-parallel group that share heads; the others form
            rings.
        max_buffer_bytes: most bytes that a server receives for a layer, with scheduler tiles; None:
            no bound.
        network_divisor: how many times slower than it is the network counts when plans are made,
            with `--distca`. A plan for a slower network moves fewer bytes between nodes.
        pool_size: data-parallel ranks of a server pool, with `--distca`, or None.
        wide_documents: tokens from which on all ranks share a document, with server pools; None:
            they share none.
        ping_pong: whether micro-batches run as two nano-batches, with `--distca`.
        head_parallel: neighbouring data-parallel ranks that share the heads of core attention by
            all-to-alls, and are one attention server, with `--distca`.
    """

    system: str
    tensor: int
    stages: int
    data: int
    context: int
    micro_batches: int
    max_in_flight: int | None = None
    tolerance: float | None = None
    may_send_latents: bool = True
    chain: int = 1
    keeps_inputs: bool = False
    all_to_all: int = 1
    max_buffer_bytes: int | None = None
    network_divisor: int = 1
    pool_size: int | None = None
    wide_documents: int | None = None
    ping_pong: bool = True
    head_parallel: int = 1

    @property
    def servers_of_stage(self) -> int:
        """Attention servers of a stage, with `--distca`."""
        return self.data // self.head_parallel

    def __str__(self) -> str:
        sizes = f"TP{self.tensor} PP{self.stages} DP{self.data}"
        sizes += f" CP{self.context}" if self.context > 1 else ""
        sizes += f" ({self.all_to_all} by a2a)" if 1 < self.all_to_all < self.context else ""
        bound = f" in pools of {self.pool_size}" if self.pool_size is not None else ""
        if self.wide_documents is not None:
            bound += f", wide from {self.wide_documents // 1024}K tokens"
        bound += f", {self.max_in_flight} in flight" if self.max_in_flight is not None else ""
        bound += f", tolerance {self.tolerance}" if self.tolerance is not None else ""
        bound += "" if self.may_send_latents else ", no latents"
        bound += f", in chains of {self.chain}" if self.chain > 1 else ""
        bound += ", inputs kept" if self.keeps_inputs else ""
        if self.max_buffer_bytes is not None:
            bound += f", buffers of {self.max_buffer_bytes / 1e6:.0f} MB"
        bound += "" if self.ping_pong else ", no ping-pong"
        bound += f", heads shared by {self.head_parallel}" if self.head_parallel > 1 else ""
        if self.network_divisor > 1:
            bound += f", planned for 1/{self.network_divisor} of the network's speed"
        return f"{sizes}, {self.micro_batches} micro-batch(es){bound}"


def options_of(candidate: Candidate, token_pairs: float | None = None) -> ExecutionOptions:
    """Returns the options of a configuration with `--distca`.

    Args:
        candidate: a configuration with `--distca`.
        token_pairs: value of `ExecutionOptions.token_pairs`.
    """
    pool = candidate.pool_size
    return DISTCA_SYSTEMS[candidate.system](
        max_in_flight=candidate.max_in_flight,
        chain=candidate.chain,
        pool_size=None if pool is None else pool // candidate.head_parallel,
        wide_documents=candidate.wide_documents,
        token_pairs=token_pairs,
        ping_pong=candidate.ping_pong,
    )


def token_pairs(costs: ModelCosts) -> float:
    """Returns the visible pairs whose attention takes as long as the other layers of a token.

    In a layer, forward and backward; the layers share the output layer.
    """
    linear = float(costs.passes @ costs.layer_seconds())
    linear += sum(costs.head_seconds()) / costs.model.layers
    both_ways = float(costs.passes @ [1, costs.cluster.backward_over_forward])
    pair = load_of_a_pair(costs.cluster.attention_cost(costs.shape))
    # A whole number, as the flag has it.
    return float(round(linear / both_ways / pair))


def layout_of(candidate: Candidate) -> BaselineLayout:
    """Returns the layout of a baseline's configuration."""
    return BaselineLayout(
        candidate.stages,
        candidate.data,
        candidate.context,
        candidate.micro_batches,
        candidate.all_to_all,
    )


def hybrid_refusal(ranks: int, workload: Workload) -> str | None:
    """Returns why Megatron-LM refuses `--hybrid-context-parallel` for a job; None: it does not.

    Args:
        ranks: data- and context-parallel ranks, one pool.
        workload: model, cluster and sizes.
    """
    if workload.model.latents is not None:
        return "Megatron-LM has no --hybrid-context-parallel with latents (MLA)"
    if ranks % 2:
        return f"Megatron-LM has --hybrid-context-parallel for an even number of ranks, not {ranks}"
    # To its loader all ranks are data-parallel ones, with at least a sequence each.
    if workload.sequences % ranks:
        return (
            f"Megatron-LM gives each of {ranks} ranks as many sequences as the others, which "
            f"{workload.sequences} do not allow: simulate with "
            f"--sequences {-(-workload.sequences // ranks) * ranks}, or with other --systems"
        )
    return None


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


def plan_global_batch(
    windows: Sequence[Int64s],
    stages: int,
    data_parallel: int,
    config: ScheduleConfig,
    options: ExecutionOptions,
    masks: LayerMasks | None = None,
    linear_work: LinearWork | None = None,
    dedicated: int = 0,
) -> PlannedGlobalBatch:
    """Makes all plans of a global batch.

    Args:
        windows: lengths of the documents in each micro-batch, or in each chain of micro-batches,
            int64; all hold the same number of tokens, which the micro-batches of a chain and the
            data-parallel ranks (and two nano-batches) divide.
        stages: number of pipeline stages.
        data_parallel: number of ranks in a stage.
        config: tolerance, cost model and links that the scheduler plans with.
        options: scheduler, nano-batches and pipeline schedule.
        masks: tokens that a query sees in the layers of a model chunk; None: all earlier tokens of
            its document.
        linear_work, dedicated: as for `GlobalBatchPlanner`.

    Raises:
        ValueError: micro-batches differ in size or don't divide, or a scheduler refuses.
    """
    servers = _servers(stages, data_parallel)
    # Nothing runs here: a rank without tokens, which a model cannot train on, is no error.
    planner = GlobalBatchPlanner(
        servers, config, options, masks or LayerMasks(), dedicated, False, linear_work
    )
    return planner.plan(documents_in_turn(windows, options.chain))


def _servers(stages: int, data_parallel: int) -> Int64s:
    """Numbers ranks as Megatron does: those of the first stage, of the second, and so on."""
    return np.arange(stages * data_parallel, dtype=np.int64).reshape(stages, data_parallel)


def planner_of(candidate: Candidate, workload: Workload) -> GlobalBatchPlanner:
    """Makes the planner of a configuration with `--distca`.

    Args:
        candidate: system and parallel sizes.
        workload: model, cluster and sizes.
    """
    costs, model = workload.costs_of(candidate), workload.model
    config = ScheduleConfig(
        tolerance=workload.tolerance if candidate.tolerance is None else candidate.tolerance,
        shape=costs.comm_shape,
        cost_model=costs.cluster.attention_cost(costs.shape),
        links=workload.planned_links(candidate),
        max_buffer_bytes=candidate.max_buffer_bytes,
    )
    pairs = None if candidate.pool_size is None else token_pairs(costs)
    linear_work = LinearWork.of_parameters(
        model.layer_parameters,
        model.vocabulary_parameters,
        model.layers // candidate.stages,
        model.heads * (model.head_dim + model.value_dim) // 2,
    )
    return GlobalBatchPlanner(
        _servers(candidate.stages, candidate.servers_of_stage),
        config,
        options_of(candidate, pairs),
        model.masks,
        # Nothing runs here: a rank without tokens, which a model cannot train on, is no error.
        checks=False,
        linear_work=linear_work,
        row_multiple=candidate.tensor * candidate.head_parallel,
    )


def incoming_of(
    candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]
) -> list[Documents]:
    """Returns the documents of each micro-batch, or chain of them, before they are shared out.

    Args:
        candidate: a configuration with `--distca`.
        workload: model, cluster and sizes.
        sequences: lengths of the documents in each sequence, int64.
    """
    count = candidate.micro_batches // candidate.chain
    if candidate.pool_size is not None and workload.sequences % count:
        (every,) = documents_in_turn([np.concatenate(sequences)])
        return every.in_parts(count)
    each = workload.sequences // count
    windows = [np.concatenate(sequences[n * each : (n + 1) * each]) for n in range(count)]
    return documents_in_turn(windows, candidate.chain)


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
        recording: keep spans for a trace, with `--distca`.

    Raises:
        ValueError: the sequences are not the workload's, or the configuration does not divide.
        BufferBoundError: no plan keeps to the configuration's bound of buffers.
    """
    if len(sequences) != workload.sequences or any(
        int(s.sum()) != workload.context for s in sequences
    ):
        raise ValueError(f"give {workload.sequences} sequences of {workload.context:,} tokens each")
    costs = workload.costs(candidate.tensor)
    if candidate.system in BASELINES:
        lengths = np.concatenate(sequences)
        return simulate_baseline(candidate.system, lengths, layout_of(candidate), costs)
    planner = planner_of(candidate, workload)
    outcome = simulate_ticks(
        planner.plan(incoming_of(candidate, workload, sequences)),
        workload.costs_of(candidate),
        ablation=ablation,
        recording=recording,
        backward="keep" if candidate.keeps_inputs else "resend",
    )
    # Padding of server pools trains nothing.
    return replace(outcome, tokens=workload.sequences * workload.context)
