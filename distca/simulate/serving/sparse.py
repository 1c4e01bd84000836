"""Seconds of a prefill that drops far keys, by the plans that its layers would run.

Layers follow each other, so each is simulated alone, by its plan (the paper's F_pipe, Eq. 6). What
is sent and computed adds up over the heads of a rank, so heads that keep different shares count as
heads that all keep the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.plan import Mask, SteppedPlan
from distca.plan.span import Floats
from distca.schedule.serving import nobody_holds
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.configure import Partitions
from distca.schedule.serving.csps.pipeline import NearToFar, thinned
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.spent import ServingResources
from distca.simulate.serving.steps import SteppedCosts, attend

_STEPS = 64
"""Steps in which mean kept ratios are rounded up, so that few plans are simulated."""


@dataclass(frozen=True)
class SparseLatency:
    """A `Latency` of prompts of a length, on a described cluster.

    Attributes:
        costs: costs of the model's layers.
        cost_model: seconds of tasks with the heads of a rank.
        levels: levels of the ranks.
        tokens: length of the prompt.
    """

    costs: InferenceCosts
    cost_model: CostModel
    levels: Levels
    tokens: int

    @cached_property
    def links(self) -> Links:
        """Links at the cluster's speeds, in the nodes and racks of the levels."""
        where = self.levels.links
        return replace(
            self.costs.links,
            ranks_per_node=where.ranks_per_node,
            nodes_per_rack=where.nodes_per_rack,
        )

    @cached_property
    def _known(self) -> dict[tuple[Partitions, tuple[int, ...]], float]:
        return {}

    def layer_seconds(self, kept: Floats, partitions: Partitions) -> Floats:
        """See `Latency.layer_seconds`."""
        means = np.ceil(kept.mean(axis=1) * _STEPS - 1e-6).astype(int)
        found = np.empty(len(means))
        for number, row in enumerate(means.tolist()):
            key = partitions, tuple(row)
            if key not in self._known:
                self._known[key] = self._simulated(row, partitions)
            found[number] = self._known[key]
        return found

    @cached_property
    def other_seconds(self) -> float:
        """See `Latency.other_seconds`."""
        last = self.costs.head_seconds(np.ones(1, dtype=np.int64))
        once = self.costs.overheads.iteration_seconds + float(last[0])
        return self.costs.model.layers * self._linear_seconds + once

    @cached_property
    def _linear_seconds(self) -> float:
        """Seconds of a layer beside its attention."""
        own = self.levels.shard(np.array([0]), np.array([self.tokens]))
        tokens = own.tokens_per_rank()
        return float((self.costs.pre_seconds(tokens) + self.costs.post_seconds(tokens)).max())

    def plan(self, partitions: Partitions) -> SteppedPlan:
        """Returns the plan of layers that drop nothing."""
        ranks, one = self.levels.ranks, np.array([0])
        dense = Sparsity.nothing_dropped(1, 1)
        strategy = NearToFar(self.levels, dense, (None,), partitions)
        new = strategy.shard(one, np.array([self.tokens]))
        return strategy.plan(nobody_holds(ranks), new, Mask())

    def plan_seconds(self, plan: SteppedPlan) -> float:
        """Returns the seconds of a layer's attention by its plan."""
        ranks = plan.plan.world_size
        resources = ServingResources(ranks, self.costs.cluster, np.ones(ranks))
        stepped_costs = SteppedCosts(plan, self.costs.shape, self.cost_model, self.links)
        attend(resources, stepped_costs, overheads=self.costs.overheads)
        return float(resources.clock.max())

    def _simulated(self, kept: list[int], partitions: Partitions) -> float:
        plan, heads = self.plan(partitions), self.costs.shape.kv_heads
        ratios = (1.0, *(each / _STEPS for each in kept))
        if min(ratios) < 1:
            plan = thinned(plan, self.levels, (ratios,) * heads, ((1.0,) * len(ratios),) * heads)
        launched = self.costs.launch_seconds() - self._linear_seconds
        return max(self.plan_seconds(plan), launched)
