"""Bins of a baseline: packed documents, one bin for each micro-batch of each replica."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from distca.simulate.sharing import Group, Index, Shared, all_gather, gather_copies, ring

RINGS = ("cp-p2p", "cp-a2a", "cp-a2a+p2p")
"""Baselines whose groups share documents by rings and all-to-alls."""
GATHERED = ("per-document-cp", "wlb-llm", "wlb-llm-paper")
"""Baselines whose groups gather all keys."""
PACKED_BY_WORK = ("wlb-llm",)
"""Baselines that pack bins of equal work, and choose where each runs."""
VARIABLE = ("wlb-llm", "wlb-llm-paper")
"""Baselines whose bins have different numbers of tokens."""
KEEPS = {"wlb-llm": 1, "wlb-llm-paper": 2}
"""How often a baseline keeps gathered keys for the backward pass; else it gathers them anew."""


@dataclass(frozen=True)
class BaselineLayout:
    """A baseline's division of the servers.

    Attributes:
        stages: number of pipeline stages.
        data_parallel: number of replicas.
        context_parallel: number of ranks in a context-parallel group.
        micro_batches: number of micro-batches of each replica.
        all_to_all: how many neighbouring ranks of a group share heads; the others form rings.
    """

    stages: int
    data_parallel: int
    context_parallel: int
    micro_batches: int
    all_to_all: int = 1

    @property
    def bins(self) -> int:
        return self.data_parallel * self.micro_batches

    @property
    def group(self) -> Group:
        """A context-parallel group, among all of all stages."""
        size = self.context_parallel
        return Group(size, self.all_to_all, self.stages * self.data_parallel * size)


@dataclass(frozen=True)
class AllWork:
    """A `CostModel` of all work of a task's queries: attention and all else, both passes.

    Attributes:
        attention: forward seconds of a task.
        with_backward: ratio of a task's forward and backward seconds to its forward seconds;
            recomputed layers have two forward passes.
        per_token: seconds of a token's work other than attention, forward and backward.
    """

    attention: CostModel
    with_backward: float
    per_token: float

    @staticmethod
    def of_last_stage(attention: CostModel, layout: BaselineLayout, costs: ModelCosts) -> AllWork:
        """Work in one layer of the last stage, whose layers share the output layer equally."""
        times = costs.passes
        per_token = float(times @ costs.layer_seconds())
        per_token += sum(costs.head_seconds()) * layout.stages / costs.model.layers
        # Collectives and copies count as work that the ranks of a group share.
        size = layout.context_parallel
        if size > 1:
            speed, _ = costs.cluster.ring(size, layout.group.servers, costs.tensor_parallel)
            per_token += int(times.sum()) * (size - 1) * costs.shape.kv_row_bytes / (1e9 * speed)
            copied = float(times @ gather_copies(size, costs, KEEPS["wlb-llm"]))
            per_token += copied / costs.cluster.copied_bytes_per_second
        both_ways = float(times @ [1, costs.cluster.backward_over_forward])
        return AllWork(attention, both_ways, per_token)

    @property
    def description(self) -> str:
        return f"{self.attention.description}, with all other work"

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`."""
        others: Floats = np.asarray(q_len, dtype=np.float64) * self.per_token
        return others + self.with_backward * self.attention.seconds(q_len, kv_len, pairs)


class PaperWork:
    """A `CostModel` by which the DistCA paper's WLB-LLM is packed: forward, of no model.

    A document of `l` tokens counts `(l / 64000)^2 + l / 64000` (the authors' public runs).
    """

    _TOKENS = 64_000.0
    description = "the square of a document's length, and its length"

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`, in units of no meaning."""
        squares: Floats = 2.0 * np.asarray(pairs, dtype=np.float64) / self._TOKENS**2
        return squares + np.asarray(q_len, dtype=np.float64) / self._TOKENS


@dataclass(frozen=True)
class Bins:
    """Work of bins, by replica and micro-batch.

    Attributes:
        tokens: tokens of each rank, `[replicas, micro-batches, ranks of a group]`; of mean ranks no
            whole numbers.
        shared: core attention in a layer, with these first two axes for its bins.
    """

    tokens: Int64s | Floats
    shared: Shared

    @staticmethod
    def of(
        name: str,
        lengths: Int64s,
        layout: BaselineLayout,
        costs: ModelCosts,
        attention: CostModel,
    ) -> Bins:
        size, bins, group = layout.context_parallel, layout.bins, layout.group
        if name in RINGS:
            tokens, documents = _in_turn(lengths, layout)
            shared = ring(documents, tokens, attention, group, costs)
        else:
            plan = _pack(name, lengths, layout, costs, attention)
            tokens = plan.placement.tokens_per_rank().reshape(bins, size)
            loads = server_loads(plan.tasks, plan.mask, plan.world_size, attention)
            seconds = loads.reshape(bins, size)
            shared = all_gather(tokens, seconds, group, costs, keeps(name, costs))
        if name in PACKED_BY_WORK:
            all_work = AllWork.of_last_stage(attention, layout, costs)
            loads = tokens * all_work.per_token + shared.attention * all_work.with_backward
            order = _to_replicas(loads.max(axis=1), layout)
        else:
            order = np.arange(bins).reshape(layout.micro_batches, layout.data_parallel).T
        return Bins(tokens, shared).select(order)

    def select(self, index: Index) -> Bins:
        """Returns the bins that a numpy index selects."""
        return Bins(self.tokens[index], self.shared.select(index))


def keeps(name: str, costs: ModelCosts) -> int:
    """How often a baseline keeps gathered keys for the backward pass; uncharged: once."""
    return KEEPS.get(name, 0) if costs.cluster.charges.baseline_copies else 1


def _in_turn(lengths: Int64s, layout: BaselineLayout) -> tuple[Int64s, list[Int64s]]:
    """Returns the tokens of each rank, `[bins, ranks]`, and the documents of each bin, one after
    the other."""
    size, tokens = layout.context_parallel, int(lengths.sum())
    _check(tokens, layout)
    each = tokens // layout.bins
    ends = np.cumsum(lengths)
    number = (ends - 1) // each
    if (number != (ends - lengths) // each).any():
        raise _crossing(each)
    documents = [lengths[number == n] for n in range(layout.bins)]
    return np.full((layout.bins, size), each // size), documents


def _check(tokens: int, layout: BaselineLayout) -> None:
    ranks = layout.bins * layout.context_parallel
    if tokens % ranks:
        raise ValueError(f"{ranks} ranks and micro-batches do not divide {tokens:,} tokens")


def _crossing(tokens: int) -> ValueError:
    return ValueError(
        f"a document crosses the end of its {tokens:,} tokens: use more context "
        "parallelism, or fewer micro-batches"
    )


def _pack(
    name: str,
    lengths: Int64s,
    layout: BaselineLayout,
    costs: ModelCosts,
    attention: CostModel,
) -> Plan:
    """Returns the plan of all bins side by side: rank `i` of bin `b` is rank `b * size + i`."""
    bins, size = layout.bins, layout.context_parallel
    ranks, tokens = bins * size, int(lengths.sum())
    _check(tokens, layout)
    config = ScheduleConfig(shape=costs.shape, cost_model=attention, context_parallel_size=size)
    if name == "wlb-llm":
        all_work = AllWork.of_last_stage(attention, layout, costs)
        most = max(_tokens_that_fit(layout, costs), tokens // bins)
        scheduler: Scheduler = WlbLlm(replace(config, cost_model=all_work), most)
    elif name == "wlb-llm-paper":
        scheduler = WlbLlm(replace(config, cost_model=PaperWork()), tokens)
    else:
        # Plain Megatron's bins lie one after the other, as documents that are packed.
        scheduler = make_scheduler("packed" if name == "plain" else name, config)
    plan = scheduler.plan(lengths, np.full(ranks, tokens // ranks, dtype=np.int64), Mask())
    crossing = distinct(plan.placement.document * bins + plan.placement.rank // size) // bins
    if (np.unique(crossing, return_counts=True)[1] > 1).any():
        raise _crossing(tokens // bins)
    return plan


def _tokens_that_fit(layout: BaselineLayout, costs: ModelCosts) -> int:
    """Returns the most tokens of a bin that fit in the memory of every stage, if all bins had as
    many."""
    size, layers = layout.context_parallel, costs.model.layers // layout.stages
    # A rank keeps its own part of the bin, and keys and values of the other parts.
    kept = keeps("wlb-llm", costs)
    each = layers * (costs.activation_bytes() + (kept * size - 1) * costs.shape.kv_row_bytes)
    one = np.ones((1, size), dtype=np.int64)
    of_kernels = all_gather(one, np.zeros((1, size)), layout.group, costs, kept).transient.max()
    fitting = []
    in_flight = most_in_flight_of_1f1b(layout.micro_batches, layout.stages)
    for stage, most in enumerate(in_flight):
        state = costs.state_bytes(stage, layout.stages, layout.data_parallel * size)
        logits = costs.logit_bytes() if stage == layout.stages - 1 else 0.0
        of_token = most * each + max(logits, float(of_kernels) + costs.recomputed_bytes())
        fitting.append((costs.cluster.usable_bytes - state) * size / of_token)
    return int(max(min(fitting), 0))


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
