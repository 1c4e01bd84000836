"""The space that a search for the best parallel configuration goes through.

`divisions` lists the configurations that divide a workload, and `candidates` those of them that may
fit in memory. `distca.simulate.variants` has variants of a configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distca.plan import Mask
from distca.plan.span import Int64s
from distca.schedule import document_loads, most_in_flight_of_1f1b
from distca.simulate.baselines import BASELINES, WITHOUT_WINDOWS
from distca.simulate.bins import GATHERED, PACKED_BY_WORK, keeps
from distca.simulate.dynamic import DYNAMIC
from distca.simulate.hybrid import HYBRID
from distca.simulate.layer_mean import LayerMean
from distca.simulate.variants import (
    divisors,
    in_one_pool,
    with_fewer_in_flight,
    with_uneven_micro_batches,
)
from distca.simulate.workload import (
    DISTCA_SYSTEMS,
    SYSTEMS,
    Candidate,
    Workload,
    hybrid_refusal,
    options_of,
)

_SMALLER = 2
"""Sizes of micro-batches with which each pipeline in one server pool is tried."""
_MOST_BINS = 16
"""Bound on WLB-LLM's bins for each sequence of a global batch: the work of the longest documents is
many times that of smaller bins."""


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
            if system == HYBRID and (pp > 1 or hybrid_refusal(servers, workload)):
                continue
            if system == DYNAMIC and servers // pp % 2:
                # Megatron has it for an even number of ranks.
                continue
            groups = divisors(servers // pp) if system in BASELINES[1:] else [1]
            # WLB-LLM's bins hold documents of any sequence, so they may be smaller than one.
            most = workload.sequences * (_MOST_BINS if system in PACKED_BY_WORK else 1)
            heads = workload.model.kv_heads // tp
            found += [
                Candidate(system, tp, pp, servers // pp // cp, cp, number, all_to_all=apart)
                for cp in groups
                for apart in _all_to_alls(system, cp, heads)
                for number in divisors(most)
                # Fewer micro-batches than stages leave most of a pipeline idle.
                if number <= most_micro_batches and (pp == 1 or number >= pp or system == DYNAMIC)
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
    sizes = [n for n in divisors(context) if heads % n == 0]
    if system == "cp-a2a":
        return [n for n in sizes if n == context]
    if system == "cp-a2a+p2p":
        return [n for n in sizes if 1 < n < context]
    return [1]


def _fills(
    system: str, workload: Workload, stages: int, data: int, context: int, micro_batches: int
) -> bool:
    """Returns whether the batch's sequences fill the micro-batches of all ranks evenly."""
    if system in DISTCA_SYSTEMS:
        return workload.sequences // micro_batches * workload.context % (2 * data) == 0
    if workload.sequences * workload.context % (data * context * micro_batches):
        return False
    if system in (HYBRID, DYNAMIC):
        # `context` is how many ranks the longest document has: a power of two. Both choose the
        # number of rounds or micro-batches themselves.
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
    flight, and with micro-batches smaller than a sequence.
    """
    found = []
    for candidate in divisions(system, workload, tensor, stages, most_micro_batches):
        tried = [
            candidate,
            *with_fewer_in_flight(candidate),
            *with_uneven_micro_batches(candidate, workload),
        ]
        usable = workload.cluster.usable_bytes
        found += [each for each in tried if least_memory(each, workload) <= usable][:1]
    return found


def pooled_pipelines(
    system: str, workload: Workload, tensor: Sequence[int], stages: Sequence[int]
) -> list[Candidate]:
    """Lists pipelines in one server pool, with the largest micro-batches that may fit in memory.

    Of each number of stages there are these and the next smaller ones, since few micro-batches are
    as large as the mean.

    Args:
        system: one of `SYSTEMS`.
        workload: model, cluster and sizes.
        tensor: tensor-parallel sizes.
        stages: pipeline sizes.
    """
    able = divisions(system, workload, tensor, [each for each in stages if each > 1])
    sizes = {(c.tensor, c.stages): replace(c, micro_batches=workload.sequences) for c in able}
    usable, found = workload.cluster.usable_bytes, list[Candidate]()
    for each in sizes.values():
        every = in_one_pool(each, workload)
        found += [c for c in every if least_memory(c, workload) <= usable][:_SMALLER]
    return found


def _divides(tp: int, workload: Workload) -> bool:
    """Returns whether a tensor-parallel size divides nodes, heads and GPUs."""
    return not (
        workload.cluster.gpus_per_node % tp
        or workload.gpus % tp
        or workload.model.heads % tp
        or workload.model.kv_heads % tp
    )


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
    if candidate.system in (HYBRID, DYNAMIC):
        # The batch may have no document as long as a sequence.
        kept = 0.0
    layers = workload.model.layers // candidate.stages
    return in_flight * layers * kept + costs.state_bytes(
        0, candidate.stages, candidate.data * candidate.context
    )


def estimate(
    candidate: Candidate,
    workload: Workload,
    sequences: Sequence[Int64s],
    ticks: int | None = None,
) -> float:
    """Returns the seconds of an iteration if core attention were perfectly shared out and exchanges
    free.

    Args:
        candidate: a configuration with `--distca`.
        workload: model, cluster and sizes.
        sequences: lengths of the documents in each sequence of a global batch.
        ticks: number of ticks, forward and backward ones; None: those of the configuration.
    """
    lengths = np.concatenate(sequences)
    if ticks is None:
        schedule = options_of(candidate).tick_schedule(candidate.micro_batches, candidate.stages)
        ticks = len(schedule.ticks)
    return ideal_seconds(candidate, workload, lengths, ticks)


def ideal_seconds(candidate: Candidate, workload: Workload, lengths: Int64s, ticks: int) -> float:
    """Returns the same of any documents: those of a server pool, say.

    Args:
        candidate: a configuration with `--distca`.
        workload: model and cluster.
        lengths: lengths of the documents, `[documents]`, which the ranks share evenly.
        ticks: number of ticks, forward and backward ones.
    """
    assert candidate.system not in BASELINES, candidate.system
    costs = workload.costs(candidate.tensor)
    kernels = LayerMean.of(costs.cluster.attention_cost(costs.shape), workload.model)
    attention = document_loads(lengths, Mask(), kernels).sum()
    both_ways = float(costs.passes @ [1, costs.cluster.backward_over_forward])
    shared = (
        workload.model.layers * both_ways * float(attention) / (candidate.stages * candidate.data)
    )
    tokens = float(lengths.sum()) / (candidate.data * candidate.micro_batches)
    linear = float(costs.passes @ costs.layer_seconds())
    layers = workload.model.layers // candidate.stages
    tick = tokens * (layers * linear + sum(costs.head_seconds()))
    # Layers run once for each nano-batch, the output layer once for both.
    launches = np.add(costs.pre_launch_seconds(), costs.post_launch_seconds())
    tick += (1 + candidate.ping_pong) * layers * float(costs.passes @ launches) + sum(
        costs.head_launch_seconds()
    )
    return shared + tick * ticks / 2
