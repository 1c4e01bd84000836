"""An iteration without `--distca`: 1F1B pipelines of context-parallel groups.

Documents are packed into *bins*: one for each micro-batch of each data-parallel replica, over the
ranks of its context-parallel group. In every layer the group gathers all keys and values of its bin
(all of them, whether seen or not), which nothing hides, and in the backward pass it reduces their
gradients: so its ranks wait for the slowest in every layer. (Megatron's ring of point-to-point
messages, which overlaps with the kernels, is not modelled.) Replicas wait for each other only for
the gradients, pipeline stages for activations. Gathered keys and values are kept for the backward
pass (paper, Section 3.2, Figure 3b).

* **packed**: plain Megatron; documents one after the other, no context parallelism.
* **per-document-cp**: the same with a group for each bin; documents are sharded head-tail.
* **wlb-llm**: WLB-LLM in its ideal form: variable-length bins of equal work over all micro-batches
  and replicas, as large as memory allows. Work is all that is judged here, forward and backward:
  attention, linear layers, collectives, and the output layer, since the last stage is the slowest.
  Each group shards documents or the sequence, whichever is faster. Bins go to replicas so that
  these have equal work, and through a replica's pipeline in the fastest of a few orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.cost.link import Links
from distca.cost.model import CostModel
from distca.plan import Mask, Plan
from distca.plan.span import Floats, Int64s
from distca.schedule import (
    ScheduleConfig,
    Scheduler,
    WlbLlm,
    make_scheduler,
    most_in_flight_of_1f1b,
)
from distca.schedule.base import server_loads
from distca.simulate.costs import ModelCosts
from distca.simulate.outcome import Outcome
from distca.simulate.resources import Span

BASELINES = ("packed", "per-document-cp", "wlb-llm")


@dataclass(frozen=True)
class AllWork:
    """Seconds of a task, forward and backward, and of all else of its queries; a `CostModel`.

    Attributes:
        attention: forward seconds of a task.
        with_backward: forward and backward seconds over forward ones.
        per_token: seconds of all else of a token.
    """

    attention: CostModel
    with_backward: float
    per_token: float

    @staticmethod
    def of_last_stage(attention: CostModel, layout: BaselineLayout, costs: ModelCosts) -> AllWork:
        """In one of its layers, between which the output layer is shared out."""
        per_token = sum(costs.pre_seconds()) + sum(costs.post_seconds())
        per_token += sum(costs.head_seconds()) * layout.stages / costs.model.layers
        if layout.context_parallel > 1:
            # As work that the ranks of a group share.
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
class BaselineLayout:
    """How a baseline divides the servers.

    Attributes:
        stages: of the pipeline.
        data_parallel: replicas.
        context_parallel: ranks of a group.
        micro_batches: of each replica.
    """

    stages: int
    data_parallel: int
    context_parallel: int
    micro_batches: int

    @property
    def bins(self) -> int:
        return self.data_parallel * self.micro_batches


def simulate_baseline(
    name: str,
    lengths: Int64s,
    layout: BaselineLayout,
    costs: ModelCosts,
    *,
    cost_model: CostModel | None = None,
    mask: Mask | None = None,
    recording: bool = False,
) -> Outcome:
    """Runs a global batch.

    Args:
        name: one of `BASELINES`.
        lengths: of its documents, int64.
        layout: how the servers are divided.
        costs: of the model on the cluster.
        cost_model: forward seconds of tasks; None: the cluster's kernel.
        mask: what a query sees; None: all earlier tokens of its document.
        recording: keep spans for a trace, of each stage of each replica.

    Raises:
        ValueError: there is no such baseline, or sizes don't divide.
    """
    if name not in BASELINES:
        raise ValueError(f"no baseline {name!r}: choose from {', '.join(BASELINES)}")
    if costs.model.layers % layout.stages:
        raise ValueError(f"{layout.stages} stages do not divide {costs.model.layers} layers")
    if name == "packed" and layout.context_parallel > 1:
        raise ValueError("packed has no context parallelism: use per-document-cp")
    attention = cost_model or costs.cluster.attention_cost(costs.shape)
    work = _Work.of(name, lengths, layout, costs, attention, mask or Mask())
    if name == "wlb-llm":
        work = _in_best_order(work, layout, costs)
    stages = [_Stage.of(work, layout, costs, stage) for stage in range(layout.stages)]
    ends, spans = _one_f_one_b(stages, work, layout, costs, recording)
    replicas = layout.data_parallel * layout.context_parallel
    seconds = 0.0
    for stage, (end, each) in enumerate(zip(ends, stages, strict=True)):
        # What the last backward pass hides costs nothing.
        hidden = float(np.max(end - each.backward[:, -1]))
        needed = costs.gradient_seconds(stage, layout.stages, replicas)
        seconds = max(seconds, float(end.max()), hidden + needed)
    gathering = np.repeat(work.gather_seconds.sum(axis=1), layout.context_parallel)
    gathering = np.tile(gathering, layout.stages) * (2 * costs.model.layers // layout.stages)
    gathered = np.repeat(work.gathered_bytes.sum(axis=1), layout.context_parallel)
    return Outcome(
        seconds,
        int(lengths.sum()),
        layout.stages * replicas * costs.tensor_parallel,
        _memory(work, layout, costs),
        costs.cluster.usable_bytes,
        np.concatenate([stage.computed for stage in stages]),
        gathering + np.concatenate([stage.waited for stage in stages]),
        gathering,
        {
            "all-gather": np.tile(gathered, layout.stages) * (costs.model.layers // layout.stages),
            "reduce-scatter": np.tile(gathered, layout.stages)
            * (costs.model.layers // layout.stages),
        },
        tuple(spans),
    )


def _links(costs: ModelCosts) -> Links:
    return costs.cluster.links(costs.tensor_parallel)


@dataclass(frozen=True)
class _Work:
    """What bins hold: `[replicas, micro-batches, ranks of a group]`, or without the last axis.

    Attributes:
        tokens: of each rank.
        attention: forward seconds of its kernels in a layer.
        gather_seconds: of its group's keys and values in a layer, one way.
        gathered_bytes: that each rank receives in it, and sends.
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
    ) -> _Work:
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
        return _Work(tokens, seconds, gather, nbytes).select(order)

    def select(self, index: Any) -> _Work:
        """What an index of numpy's selects of each."""
        return _Work(
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
    crossing = np.unique(plan.placement.document * bins + plan.placement.rank // size) // bins
    if (np.unique(crossing, return_counts=True)[1] > 1).any():
        raise ValueError(
            f"a document crosses the end of its {tokens // bins:,} tokens: use more context "
            "parallelism, or fewer micro-batches"
        )
    return plan


def _tokens_that_fit(layout: BaselineLayout, costs: ModelCosts) -> int:
    """Of a bin, if all bins had as many, in the memory of every stage."""
    size, layers = layout.context_parallel, costs.model.layers // layout.stages
    # A rank keeps its own part of the bin, and keys and values of the others'.
    each = layers * (costs.activation_bytes() + (size - 1) * costs.shape.kv_row_bytes)
    fitting = []
    in_flight = most_in_flight_of_1f1b(layout.micro_batches, layout.stages)
    for stage, most in enumerate(in_flight):
        state = costs.state_bytes(stage, layout.stages, layout.data_parallel * size)
        kept = most * each
        if stage == layout.stages - 1:
            kept += costs.logit_bytes()
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
    """Which bins each replica has, the heaviest first, so that all have equal work.

    Args:
        loads: of each bin, `[bins]`.
        layout: how the servers are divided.

    Returns:
        int64 `[replicas, micro-batches]`.
    """
    members: list[list[int]] = [[] for _ in range(layout.data_parallel)]
    totals = np.zeros(layout.data_parallel)
    for number in np.argsort(-loads, kind="stable").tolist():
        open_ones = [n for n, own in enumerate(members) if len(own) < layout.micro_batches]
        chosen = min(open_ones, key=lambda n: (totals[n], n))
        members[chosen].append(number)
        totals[chosen] += loads[number]
    return np.array(members, dtype=np.int64)


def _in_best_order(work: _Work, layout: BaselineLayout, costs: ModelCosts) -> _Work:
    """Each replica's micro-batches, which come the heaviest first, in the order that ends first.

    A pipeline waits for the first micro-batch to come and for the last to go, so light ones at both
    ends are often best; and the heaviest delays least where no stage has it alone.
    """
    if layout.stages == 1:
        return work
    heaviest_first = np.arange(layout.micro_batches)
    lightest_first = heaviest_first[::-1]
    orders = [
        heaviest_first,
        lightest_first,
        np.roll(heaviest_first, 1),
        np.roll(lightest_first, -1),
        np.concatenate([lightest_first[::2], lightest_first[1::2][::-1]]),
    ]
    ends = []
    for order in orders:
        tried = work.select((slice(None), order))
        stages = [_Stage.of(tried, layout, costs, stage) for stage in range(layout.stages)]
        ends.append(np.max(_one_f_one_b(stages, tried, layout, costs, False)[0], axis=0))
    best = np.array(orders)[np.argmin(ends, axis=0)]
    return work.select((np.arange(layout.data_parallel)[:, None], best))


@dataclass(frozen=True)
class _Stage:
    """What a stage's passes take.

    Attributes:
        forward: seconds of each pass, `[replicas, micro-batches]`.
        backward: the same.
        computed: seconds that each rank computes in all of them, `[ranks]`.
        waited: seconds that it waits for the slowest of its group, `[ranks]`.
    """

    forward: Floats
    backward: Floats
    computed: Floats
    waited: Floats

    @staticmethod
    def of(work: _Work, layout: BaselineLayout, costs: ModelCosts, stage: int) -> _Stage:
        layers = costs.model.layers // layout.stages
        passes, computed, waited = [], 0.0, 0.0
        for direction, factor in ((0, 1.0), (1, costs.cluster.backward_over_forward)):
            linear = costs.pre_seconds()[direction] + costs.post_seconds()[direction]
            launch = costs.cluster.launch_seconds
            # What the ranks of a group do until they wait for each other.
            of_layer = work.tokens * linear + factor * work.attention + launch
            parts: list[Floats] = [layers * of_layer]
            if stage == layout.stages - 1:
                parts.append(work.tokens.astype(np.float64) * costs.head_seconds()[direction])
            each = layers * work.gather_seconds
            for part in parts:
                slowest = part.max(axis=2, keepdims=True)
                each = each + slowest[:, :, 0]
                computed = computed + part.sum(axis=1).ravel()
                waited = waited + (slowest - part).sum(axis=1).ravel()
            passes.append(each)
        return _Stage(passes[0], passes[1], np.asarray(computed), np.asarray(waited))


def order_of_1f1b(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """What a stage does in turn: whether it is a forward pass, and of which micro-batch."""
    ahead = min(stages - 1 - stage, micro_batches)
    order = [(True, number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            order.append((True, ahead + number))
        order.append((False, number))
    return order


def _one_f_one_b(
    passes: Sequence[_Stage],
    work: _Work,
    layout: BaselineLayout,
    costs: ModelCosts,
    recording: bool,
) -> tuple[list[Floats], list[Span]]:
    """When each replica of each stage has done all its passes, `[replicas]`, and spans."""
    stages, micro_batches = layout.stages, layout.micro_batches
    ranks = layout.data_parallel * layout.context_parallel
    crosses = ranks >= _links(costs).ranks_per_node
    message = costs.message_seconds(work.tokens.max(axis=2).astype(np.float64), crosses)
    left = [order_of_1f1b(stage, stages, micro_batches) for stage in range(stages)]
    clocks = [np.zeros(layout.data_parallel) for _ in range(stages)]
    done: dict[tuple[int, bool, int], Floats] = {}
    spans: list[Span] = []
    while any(left):
        for stage in range(stages):
            while left[stage]:
                forward, number = left[stage][0]
                other = stage - 1 if forward else stage + 1
                start = clocks[stage]
                if 0 <= other < stages:
                    if (other, forward, number) not in done:
                        break
                    start = np.maximum(start, done[other, forward, number] + message[:, number])
                mine = passes[stage]
                end = start + (mine.forward if forward else mine.backward)[:, number]
                clocks[stage] = done[stage, forward, number] = end
                left[stage].pop(0)
                if recording:
                    name = f"{'forward' if forward else 'backward'}: micro-batch {number}"
                    spans += [
                        Span(
                            (stage * layout.data_parallel + replica) * layout.context_parallel,
                            "ticks",
                            name,
                            float(start[replica]),
                            float(end[replica]),
                            {},
                        )
                        for replica in range(layout.data_parallel)
                    ]
    return clocks, spans


def _memory(work: _Work, layout: BaselineLayout, costs: ModelCosts) -> Floats:
    """Of each rank's GPUs at most, `[stages * ranks]`."""
    layers = costs.model.layers // layout.stages
    replicas = layout.data_parallel * layout.context_parallel
    in_flight = most_in_flight_of_1f1b(layout.micro_batches, layout.stages)
    size = layout.context_parallel
    others = work.tokens.sum(axis=2, keepdims=True) - work.tokens if size > 1 else 0 * work.tokens
    kept = layers * (
        work.tokens * costs.activation_bytes() + others * float(costs.shape.kv_row_bytes)
    )
    found = []
    for stage, most in enumerate(in_flight):
        # 1F1B keeps consecutive micro-batches.
        together = np.stack(
            [kept[:, n : n + most].sum(axis=1) for n in range(layout.micro_batches - most + 1)]
        ).max(axis=0)
        peak = together.ravel() + costs.state_bytes(stage, layout.stages, replicas)
        if stage == layout.stages - 1:
            peak = peak + costs.logit_bytes() * work.tokens.max(axis=1).ravel()
        found.append(peak)
    return np.concatenate(found)
