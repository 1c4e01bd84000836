"""Plans of a micro-batch: a pure function of its documents, for data loaders' workers, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from distca.library.compared import digest_of_plans
from distca.library.documents import Document
from distca.library.nodes import Nodes
from distca.library.share import Given, as_documents, digest
from distca.library.trees import Tree
from distca.plan import Mask, Plan, validate_plan
from distca.plan.span import Int64s
from distca.schedule import (
    ScheduleConfig,
    TilesScheduler,
    even_capacities,
    make_scheduler,
)


@dataclass(frozen=True)
class PlannedDocuments:
    """Documents of a micro-batch and how ranks share them, the same on all ranks.

    Attributes:
        documents: documents and trees that all ranks share.
        plans: a plan for each mask, all with the same placement.
    """

    documents: tuple[Document | Tree, ...]
    plans: tuple[Plan, ...]

    @cached_property
    def digests(self) -> tuple[int, int]:
        """Numbers of 63 bits that other documents, and other plans, hardly have."""
        return digest(self.documents), digest_of_plans(self.plans)


@dataclass(frozen=True)
class PlanDocuments:
    """Plans micro-batches. It can be pickled, so that a data loader's `collate_fn` may be this.

    Attributes:
        scheduler: name of the scheduler.
        config: configuration of the scheduler.
        masks: masks of the model's layers. The first one's plan places the tokens.
        ranks: ranks that share a micro-batch.
    """

    scheduler: str
    config: ScheduleConfig
    masks: tuple[Mask, ...]
    ranks: int

    def __call__(self, given: Sequence[Given]) -> PlannedDocuments:
        """Plans a micro-batch.

        Args:
            given: documents, trees, or documents' tokens alone, int64 `[tokens]`.

        Raises:
            ValueError: see `Document`; there are no documents; or there are trees, and two
                rollouts with one number or another scheduler than `tiles`.
        """
        documents = as_documents(given)
        nodes = Nodes(documents)
        capacities = even_capacities(int(nodes.own_lengths.sum()), self.ranks)
        if nodes.have_trees:
            plans = self._plan_trees(nodes, capacities)
        else:
            scheduler, lengths = make_scheduler(self.scheduler, self.config), nodes.lengths
            first = scheduler.plan(lengths, capacities, self.masks[0])
            others = (scheduler.schedule(lengths, first.placement, mask) for mask in self.masks[1:])
            plans = first, *others
        for plan in plans:
            validate_plan(plan)
        made = PlannedDocuments(documents, plans)
        # Also in a data loader's worker, which has the time. They are pickled with the plans.
        _ = made.digests
        return made

    def _plan_trees(self, nodes: Nodes, capacities: Int64s) -> tuple[Plan, ...]:
        if self.scheduler != "tiles":
            raise ValueError(
                f"the scheduler {self.scheduler} plans no rollouts that share tokens: make the "
                'planner with scheduler="tiles"'
            )
        windows = [mask for mask in self.masks if mask != Mask()]
        if windows and nodes.two_way.any():
            raise ValueError(
                f"two-way nodes do not go together with {windows[0]}: the keys that a window shows "
                "of a node's path are no rectangle; use a model without windows and chunks"
            )
        numbers = [n for each in nodes.documents if isinstance(each, Tree) for n in each.rollouts]
        twice = [n for n, count in Counter(numbers).items() if count > 1]
        if twice:
            raise ValueError(
                f"two rollouts are number {twice[0]} in one micro-batch: give `share_prefixes` "
                "another `first` for each call, or give the rollouts instead of their trees"
            )
        scheduler = TilesScheduler(self.config)
        paths = nodes.in_plans
        lengths, family = paths.lengths, paths.family
        first = scheduler.plan(lengths, capacities, self.masks[0], *family)
        placement = first.placement
        others = (scheduler.schedule(lengths, placement, mask, *family) for mask in self.masks[1:])
        return first, *others
