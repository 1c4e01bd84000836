"""Our own choice of a prefill's strategy: the least predicted seconds of the actual plans.

The paper's rules are thresholds for one sequence of which each rank holds equal shares. A plan
knows who holds what, how many sequences are fed together and which rows are on their server
already; a measured profile knows the kernel; the simulator knows what runs behind what.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.volume import AttentionShape
from distca.plan import Placement, Plan
from distca.schedule.serving import STRATEGIES, Planned, Strategy
from distca.simulate.cluster import Cluster
from distca.simulate.resources import Resources
from distca.simulate.serving.steps import SteppedCosts, attend


@dataclass(frozen=True)
class SimulatedSelector:
    """A `Selector` by simulated seconds of a layer's core attention; linear layers are the same.

    Attributes:
        shape: heads of a rank.
        cluster: latencies and rates of the machine.
        links: links between the ranks.
        cost_model: seconds of tasks with these heads, as measured by `distca profile`.
    """

    shape: AttentionShape
    cluster: Cluster
    links: Links
    cost_model: CostModel

    def seconds(self, plan: Plan) -> float:
        """Predicts the seconds of a layer's core attention, until the last rank is done."""
        resources = Resources(plan.world_size, self.cluster, np.ones(plan.world_size))
        attend(resources, SteppedCosts(plan, self.shape, self.cost_model, self.links))
        return float(resources.clock.max())

    def choose(self, held: Placement, new: Placement, planned: Planned) -> Strategy:
        """See `Selector.choose`."""
        return min(STRATEGIES, key=lambda strategy: self.seconds(planned(strategy)))
