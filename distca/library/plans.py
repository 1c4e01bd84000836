"""Plans of a micro-batch: a pure function of its documents, for data loaders' workers, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distca.library.documents import Document, as_documents
from distca.plan import Mask, Plan, validate_plan
from distca.schedule import ScheduleConfig, even_capacities, make_scheduler


@dataclass(frozen=True)
class PlannedDocuments:
    """Documents of a micro-batch and how ranks share them, the same on all ranks.

    Attributes:
        documents: documents that all ranks share.
        plans: a plan for each mask, all with the same placement.
    """

    documents: tuple[Document, ...]
    plans: tuple[Plan, ...]


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

    def __call__(self, given: Sequence[Document | torch.Tensor]) -> PlannedDocuments:
        """Plans a micro-batch.

        Args:
            given: documents, or their tokens alone, int64 `[tokens]`.

        Raises:
            ValueError: see `Document`; or there are no documents.
        """
        documents = as_documents(given)
        lengths = np.array([len(each.tokens) for each in documents], dtype=np.int64)
        scheduler = make_scheduler(self.scheduler, self.config)
        capacities = even_capacities(int(lengths.sum()), self.ranks)
        first = scheduler.plan(lengths, capacities, self.masks[0])
        others = (scheduler.schedule(lengths, first.placement, mask) for mask in self.masks[1:])
        plans = first, *others
        for plan in plans:
            validate_plan(plan)
        return PlannedDocuments(documents, plans)
