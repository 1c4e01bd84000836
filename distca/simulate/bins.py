"""Bins of a baseline: packed documents, one bin for each micro-batch of each replica."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.plan import Mask, Plan
from distca.plan.span import Floats, Int64s, distinct
from distca.schedule import (
    ScheduleConfig,
    Scheduler,
    WlbLlm,
    make_scheduler,
    most_in_flight_of_1f1b,
)
from distca.schedule.base import server_loads
from distca.simulate.costs import ModelCosts


@dataclass(frozen=True)
class BaselineLayout:
    """A baseline's division of the servers.

    Attributes:
        stages: number of pipeline stages.
        data_parallel: number of replicas.
        context_parallel: number of ranks in a context-parallel group.
        micro_batches: number of micro-batches of each replica.
    """

    stages: int
    data_parallel: int
    context_parallel: int
    micro_batches: int

    @property
    def bins(self) -> int:
        return self.data_parallel * self.micro_batches


@dataclass(frozen=True)
class AllWork:
    """A `CostModel` of all work of a task's queries: attention and all else, both passes.

    Attributes:
        attention: forward seconds of a task.
        with_backward: ratio of a task's forward and backward seconds to its forward seconds.
        per_token: seconds of a token's work other than attention, forward and backward.
    """

    attention: CostModel
    with_backward: float
    per_token: float

    @staticmethod
    def of_last_stage(attention: CostModel, layout: BaselineLayout, costs: ModelCosts) -> AllWork:
        """Work in one layer of the last stage, whose layers share the output layer equally."""
        per_token = sum(costs.pre_seconds()) + sum(costs.post_seconds())
        per_token += sum(costs.head_seconds()) * layout.stages / costs.model.layers
        # Collectives count as work that the ranks of a group share.
        others = layout.context_parallel - 1
        speed = 1e9 * _ring(layout, costs)[0]
        per_token += 2 * others * costs.shape.kv_row_bytes / speed
        return AllWork(attention, 1 + costs.cluster.backward_over_forward, per_token)

    @property
    def description(self) -> str:
        return f"{self.attention.description}, with all other work"

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`."""
        others: Floats = np.asarray(q_len, dtype=np.float64) * self.per_token
        return others + self.with_backward * self.attention.seconds(q_len, kv_len, pairs)


@dataclass(frozen=True)
class Bins:
    """Work and bytes of bins: `[replicas, micro-batches, ranks of a group]`.

    Attributes:
        tokens: tokens of each rank.
        attention: forward seconds of each rank's kernels in a layer.
        gather_seconds: seconds of a group's all-gather of keys and values in a layer,
            `[replicas, micro-batches]`.
        gathered_bytes: bytes that each rank receives, and sends, in that all-gather,
            `[replicas, micro-batches]`.
    """

    tokens: Int64s
    attention: Floats
    gather_seconds: Floats
    gathered_bytes: Int64s

    @staticmethod
    def of(
        name: str,
        lengths: Int64s,
        layout: BaselineLayout,
        costs: ModelCosts,
        attention: CostModel,
        mask: Mask,
    ) -> Bins:
        size, bins = layout.context_parallel, layout.bins
        plan = _pack(name, lengths, layout, costs, attention, mask)
        ranks = plan.world_size
        tokens = plan.placement.tokens_per_rank().reshape(bins, size)
        seconds = server_loads(plan.tasks, mask, ranks, attention).reshape(bins, size)
        gather, nbytes = _gather(tokens.sum(axis=1), layout, costs)
        if name == "wlb-llm":
            all_work = AllWork.of_last_stage(attention, layout, costs)
            loads = tokens * all_work.per_token + seconds * all_work.with_backward
            order = _to_replicas(loads.max(axis=1), layout)
        else:
            order = np.arange(bins).reshape(layout.micro_batches, layout.data_parallel).T
        return Bins(tokens, seconds, gather, nbytes).select(order)

    def select(self, index: Any) -> Bins:
        """The bins that a numpy index selects."""
        return Bins(
            self.tokens[index],
            self.attention[index],
            self.gather_seconds[index],
            self.gathered_bytes[index],
        )


def _pack(
    name: str,
    lengths: Int64s,
    layout: BaselineLayout,
    costs: ModelCosts,
    attention: CostModel,
    mask: Mask,
) -> Plan:
    """The plan of all bins side by side: rank `i` of bin `b` is rank `b * size + i`."""
    bins, size = layout.bins, layout.context_parallel
    ranks, tokens = bins * size, int(lengths.sum())
    if tokens % ranks:
        raise ValueError(f"{ranks} ranks and micro-batches do not divide {tokens:,} tokens")
    config = ScheduleConfig(shape=costs.shape, cost_model=attention, context_parallel_size=size)
    if name == "wlb-llm":
        all_work = AllWork.of_last_stage(attention, layout, costs)
        most = max(_tokens_that_fit(layout, costs), tokens // bins)
        scheduler: Scheduler = WlbLlm(replace(config, cost_model=all_work), most)
    else:
        scheduler = make_scheduler(name, config)
    plan = scheduler.plan(lengths, np.full(ranks, tokens // ranks, dtype=np.int64), mask)
    crossing = distinct(plan.placement.document * bins + plan.placement.rank // size) // bins
    if (np.unique(crossing, return_counts=True)[1] > 1).any():
        raise ValueError(
            f"a document crosses the end of its {tokens // bins:,} tokens: use more context "
            "parallelism, or fewer micro-batches"
        )
    return plan


def _tokens_that_fit(layout: BaselineLayout, costs: ModelCosts) -> int:
    """The most tokens of a bin that fit in the memory of every stage, if all bins had as many."""
    size, layers = layout.context_parallel, costs.model.layers // layout.stages
    # A rank keeps its own part of the bin, and keys and values of the other parts.
    each = layers * (costs.activation_bytes() + (size - 1) * costs.shape.kv_row_bytes)
    fitting = []
    in_flight = most_in_flight_of_1f1b(layout.micro_batches, layout.stages)
    for stage, most in enumerate(in_flight):
        state = costs.state_bytes(stage, layout.stages, layout.data_parallel * size)
        kept = most * each + costs.backward_bytes(stage == layout.stages - 1, size)
        fitting.append((costs.cluster.usable_bytes - state) * size / kept)
    return int(max(min(fitting), 0))


def _ring(layout: BaselineLayout, costs: ModelCosts) -> tuple[float, float]:
    """Speed and latency of a group's collectives: see `Cluster.ring`."""
    size = layout.context_parallel
    servers = layout.stages * layout.data_parallel * size
    return costs.cluster.ring(size, servers, costs.tensor_parallel)


def _gather(tokens: Int64s, layout: BaselineLayout, costs: ModelCosts) -> tuple[Floats, Int64s]:
    """Seconds and bytes of an all-gather in rings over each group, `[bins]`."""
    size = layout.context_parallel
    if size == 1:
        return np.zeros(len(tokens)), np.zeros_like(tokens)
    speed, latency = _ring(layout, costs)
    nbytes = tokens * costs.shape.kv_row_bytes * (size - 1) // size
    launch = costs.cluster.launch_seconds
    return nbytes / (speed * 1e9) + latency * (size - 1) + launch, nbytes


def _to_replicas(loads: Floats, layout: BaselineLayout) -> Int64s:
    """Deals bins out to replicas, the heaviest first, so that all have equal work.

    Args:
        loads: work of each bin, `[bins]`.
        layout: division of the servers.

    Returns:
        Numbers of each replica's bins, int64 `[replicas, micro-batches]`.
    """
    members: list[list[int]] = [[] for _ in range(layout.data_parallel)]
    totals = np.zeros(layout.data_parallel)
    for number in np.argsort(-loads, kind="stable").tolist():
        open_ones = [n for n, own in enumerate(members) if len(own) < layout.micro_batches]
        chosen = min(open_ones, key=lambda n: (totals[n], n))
        members[chosen].append(number)
        totals[chosen] += loads[number]
    return np.array(members, dtype=np.int64)
