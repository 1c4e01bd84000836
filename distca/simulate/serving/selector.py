"""Our own choice of a prefill's strategy: the least predicted seconds of the actual plans.

The paper's rules are thresholds for one sequence that all ranks hold equal shares of. A plan
knows who holds what, how many sequences are fed together and which rows are on their server
already; a measured profile knows the kernel; the simulator knows what runs behind what.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.volume import AttentionShape
from distca.plan import Placement, SteppedPlan
from distca.schedule.serving import STRATEGIES, Planned, Selector, Strategy
from distca.simulate.cluster import Cluster
from distca.simulate.serving.overheads import NO_OVERHEADS, Overheads
from distca.simulate.serving.spent import ServingResources
from distca.simulate.serving.steps import SteppedCosts, attend

SIMULATING_SECONDS = 1.3e-3
"""CPU seconds for both strategies' plans and their simulation, for each rank that shares them: 10
ms on 8 ranks of an AMD EPYC."""

SHARE = 0.05
"""Part of core attention's time that choosing may take where it is hurried."""


@dataclass(frozen=True)
class SimulatedSelector:
    """A `Selector` by simulated seconds of a layer's core attention; linear layers are the same.

    Attributes:
        shape: heads of a rank.
        cluster: latencies and rates of the machine.
        links: links between the ranks.
        cost_model: seconds of tasks with these heads, as measured by `distca profile`.
        layers: layers that run in the time that a choice is held against.
        quick: what chooses where simulating would take longer than `SHARE` of all layers' core
            attention; None: it is always simulated.
        overheads: what steps and exchanges cost beside their work.
    """

    shape: AttentionShape
    cluster: Cluster
    links: Links
    cost_model: CostModel
    layers: int = 1
    quick: Selector | None = None
    overheads: Overheads = NO_OVERHEADS

    def seconds(self, plan: SteppedPlan) -> float:
        """Predicts the seconds of a layer's core attention, until the last rank is done."""
        ranks = plan.plan.world_size
        resources = ServingResources(ranks, self.cluster, np.ones(ranks))
        stepped_costs = SteppedCosts(plan, self.shape, self.cost_model, self.links)
        attend(resources, stepped_costs, overheads=self.overheads)
        return float(resources.clock.max())

    def choose(self, held: Placement, new: Placement, planned: Planned) -> Strategy:
        """See `Selector.choose`."""
        if self.quick is not None:
            ranks = new.world_size
            if SIMULATING_SECONDS * ranks > SHARE * self.layers * self._kernels(held, new):
                return self.quick.choose(held, new, planned)
        return min(STRATEGIES, key=lambda strategy: self.seconds(planned(strategy)))

    def _kernels(self, held: Placement, new: Placement) -> float:
        """Returns the seconds of a layer's kernels, if all ranks had as much of each sequence."""
        sizes = int(new.document.max()) + 1, int(held.document.max(initial=0)) + 1
        q, kv = np.zeros((2, max(sizes)), dtype=np.int64)
        for tokens, of in ((q, new), (kv, held)):
            np.add.at(tokens, of.document, of.end - of.start)
        q, kv = q[q > 0], kv[q > 0]
        keys, pairs = q + kv, (q * kv + q * q / 2) / new.world_size
        each = self.cost_model.seconds(-(-q // new.world_size), keys, pairs.astype(np.int64))
        return float(each.sum())
