"""1F1B pipelines of a baseline's replicas: seconds of passes, and when each begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca.plan.span import Floats, Int64s
from distca.simulate.bins import BaselineLayout, Bins
from distca.simulate.costs import ModelCosts


@dataclass(frozen=True)
class Passes:
    """Seconds of a stage's passes.

    In each layer the replicas that share experts wait for the slowest of them.

    Attributes:
        forward: seconds of each forward pass, `[replicas, micro-batches]`.
        backward: seconds of each backward pass, `[replicas, micro-batches]`.
        computed: seconds that each rank computes in all passes, `[ranks]`.
        waited: seconds that each rank waits for the slowest of its group, and for other replicas
            with its experts, `[ranks]`.
    """

    forward: Floats
    backward: Floats
    computed: Floats
    waited: Floats

    @staticmethod
    def of(bins: Bins, layout: BaselineLayout, costs: ModelCosts, stage: int) -> Passes:
        layers = costs.model.layers // layout.stages
        cluster, shared = costs.cluster, bins.shared
        passes: list[Floats] = []
        computed, waited, again = np.zeros(1), np.zeros(1), np.zeros(1)
        for direction, factor in ((0, 1.0), (1, cluster.backward_over_forward)):
            linear = costs.layer_seconds()[direction]
            launch = cluster.launch_seconds * shared.calls[:, :, None]
            launch = launch + costs.pre_launch_seconds()[direction]
            launch = launch + costs.post_launch_seconds()[direction]
            copied = shared.copied[..., direction] / cluster.copied_bytes_per_second
            # Parts after which the ranks of a group wait for each other.
            of_layer = bins.tokens * linear + factor * shared.attention + copied + launch
            parts: list[NDArray[np.floating]] = [layers * (of_layer + again)]
            if stage == layout.stages - 1:
                head = costs.head_launch_seconds()[direction]
                parts.append(bins.tokens * costs.head_seconds()[direction] + head)
            each = layers * shared.exposed[..., direction]
            if costs.recompute == "full":
                each = each + direction * layers * shared.exposed[..., 0]
                again = of_layer
            for part in parts:
                slowest = part.max(axis=2, keepdims=True)
                each = each + slowest[:, :, 0]
                computed = computed + part.sum(axis=1).ravel()
                waited = waited + (slowest - part).sum(axis=1).ravel()
            together = _slowest_with_its_experts(each, layout, costs)
            waited = waited + np.repeat((together - each).sum(axis=1), bins.tokens.shape[2])
            passes.append(together)
        return Passes(passes[0], passes[1], np.asarray(computed), np.asarray(waited))

    def with_experts(self, layout: BaselineLayout, costs: ModelCosts) -> Passes:
        """Returns the passes of replicas that wait for those that share their experts."""
        both = self.forward, self.backward
        together = [_slowest_with_its_experts(each, layout, costs) for each in both]
        more = sum((a - b).sum(axis=1) for a, b in zip(together, both, strict=True))
        waited = self.waited + np.repeat(more, layout.context_parallel)
        return Passes(together[0], together[1], self.computed, waited)


def _slowest_with_its_experts(seconds: Floats, layout: BaselineLayout, costs: ModelCosts) -> Floats:
    """Returns the seconds of the slowest replica among those that share its experts.

    Args:
        seconds: seconds of each replica's passes, `[replicas, micro-batches]`.
        layout: division of the servers; neighbouring replicas share experts.
        costs: costs of the model on the cluster.
    """
    replicas = len(seconds)
    if replicas != layout.data_parallel:
        # Bins of a lower bound, which are those of no replicas.
        return seconds
    size = costs.servers_with_all_experts(replicas * layout.context_parallel)
    number = max(size // layout.context_parallel, 1)
    number = replicas if replicas % number else number
    slowest = seconds.reshape(replicas // number, number, -1).max(axis=1)
    return np.repeat(slowest, number, axis=0)


def order_of_1f1b(stage: int, stages: int, micro_batches: int) -> list[tuple[bool, int]]:
    """Passes of a stage in turn: whether each is a forward pass, and its micro-batch."""
    ahead = min(stages - 1 - stage, micro_batches)
    order = [(True, number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            order.append((True, ahead + number))
        order.append((False, number))
    return order


def one_f_one_b(
    passes: Sequence[Passes],
    bins: Bins,
    layout: BaselineLayout,
    costs: ModelCosts,
    groups: Int64s | None = None,
) -> list[Floats]:
    """Runs the pipelines; returns when each replica's stages end, `[replicas]` each.

    Args:
        passes: seconds of each stage's passes.
        bins: what the replicas run.
        layout: division of the servers.
        costs: costs of the model on the cluster.
        groups: number below `replicas` of the group with which each replica enters a micro-batch,
            int64 `[replicas, micro-batches]`; None: each enters alone.
    """
    stages, micro_batches = layout.stages, layout.micro_batches
    ranks = layout.data_parallel * layout.context_parallel
    crosses = ranks >= costs.cluster.links(costs.tensor_parallel).ranks_per_node
    message = costs.message_seconds(bins.tokens.max(axis=2).astype(np.float64), crosses)
    left = [order_of_1f1b(stage, stages, micro_batches) for stage in range(stages)]
    clocks = [np.zeros(layout.data_parallel) for _ in range(stages)]
    done: dict[tuple[int, bool, int], Floats] = {}
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
                if groups is not None:
                    together = np.zeros_like(start)
                    np.maximum.at(together, groups[:, number], start)
                    start = together[groups[:, number]]
                mine = passes[stage]
                end = start + (mine.forward if forward else mine.backward)[:, number]
                clocks[stage] = done[stage, forward, number] = end
                left[stage].pop(0)
    return clocks


def in_best_order(bins: Bins, layout: BaselineLayout, costs: ModelCosts) -> Bins:
    """Reorders each replica's micro-batches, given the heaviest first, so that it ends earliest.

    A pipeline waits for the first micro-batch to come and for the last to go, so light ones at both
    ends are often best; and the heaviest delays least where no stage has it alone.
    """
    if layout.stages == 1:
        return bins
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
        tried = bins.select((slice(None), order))
        stages = [Passes.of(tried, layout, costs, stage) for stage in range(layout.stages)]
        ends.append(np.max(one_f_one_b(stages, tried, layout, costs), axis=0))
    best = np.array(orders)[np.argmin(ends, axis=0)]
    return bins.select((np.arange(layout.data_parallel)[:, None], best))
