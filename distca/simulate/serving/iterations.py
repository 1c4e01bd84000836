"""An iteration of the engine: chunks of prompts and decoded tokens, by the plans that ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.volume import AttentionShape, Messages
from distca.plan import Mask
from distca.schedule.serving.batches import DecodeBatch, PrefillBatch
from distca.schedule.serving.iteration import BatchPlan
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.spent import ServingResources
from distca.simulate.serving.steps import (
    AttentionCosts,
    PlanStepCosts,
    SteppedCosts,
    costs_of,
    merging_bytes,
    run_layers,
)


@dataclass(frozen=True)
class DecodeCosts:
    """Costs of a layer's core attention of decoded tokens: those of their pass-Q plan, in one step.

    Attributes:
        batch: decoded tokens.
        mask: what the layer's queries see.
        shape: heads of one GPU.
        cost_model: seconds of tasks with these heads.
        links: links between the ranks.
    """

    batch: DecodeBatch
    mask: Mask
    shape: AttentionShape
    cost_model: CostModel
    links: Links

    @cached_property
    def steps(self) -> tuple[PlanStepCosts]:
        """Costs of the step."""
        seen, owners = self.batch.rows - self.batch.hidden[self.mask], self.batch.owners
        ranks, away = seen.shape[1], self.batch.away(self.mask)
        sequence, server = np.nonzero(seen)
        keys, ones = seen[sequence, server], np.ones(len(server), dtype=np.int64)
        seconds, travels = np.zeros(ranks), np.zeros((ranks, ranks), dtype=np.int64)
        np.add.at(seconds, server, self.cost_model.seconds(ones, keys, keys))
        queries, servers = np.nonzero(away)
        np.add.at(travels, (owners[queries], servers), 1)
        shape = self.shape
        return (
            PlanStepCosts(
                seconds,
                seen.any(axis=0).astype(np.int64),
                merging_bytes((seen > 0).sum(axis=0), shape),
                merging_bytes(travels.sum(axis=1), shape),
                travels.sum(axis=0) * shape.q_row_bytes,
                costs_of(Messages.of_matrix(travels * shape.q_row_bytes), self.links),
                costs_of(Messages.of_matrix(travels.T * shape.result_row_bytes), self.links),
            ),
        )


def simulate_iteration(
    plan: BatchPlan,
    costs: InferenceCosts,
    cost_model: CostModel | None = None,
    moves: Messages | None = None,
) -> ServingResources:
    """Simulates an iteration until the logits of each sequence's last token.

    Args:
        plan: plans of the iteration, with the masks of the model's layers.
        costs: costs of the layers.
        cost_model: seconds of tasks with the heads of a GPU; None: the cluster's own.
        moves: bytes of keys and values that change their rank in each layer, or None.

    Returns:
        The ranks afterwards: `clock` says when each has ended, and `sent` what it has sent.
    """
    ranks, masks = len(plan.new_tokens), costs.model.masks
    if all(isinstance(part, DecodeBatch) for part in plan.parts):
        costs = costs.of_decode()
    model = cost_model or costs.attention_cost()
    resources = ServingResources(ranks, costs.cluster, np.ones(ranks))
    known: dict[object, AttentionCosts] = {}

    def of_part(part: PrefillBatch | DecodeBatch, layer: int) -> AttentionCosts:
        mask, rest = masks.of_layer(layer), (costs.shape, model, costs.links)
        if isinstance(part, PrefillBatch):
            stepped = part.plans.of(layer, mask)
            return known.setdefault(id(stepped), SteppedCosts(stepped, *rest))
        return known.setdefault(mask, DecodeCosts(part, mask, *rest))

    layers = [[of_part(part, layer) for part in plan.parts] for layer in range(costs.model.layers)]
    answered = np.sum([_last_owners(part, ranks) for part in plan.parts], axis=0)
    run_layers(resources, costs, plan.new_tokens, layers, answered, moves)
    return resources


def _last_owners(part: PrefillBatch | DecodeBatch, ranks: int) -> Sequence[int]:
    """Number of sequences whose last token each rank owns, `[ranks]`."""
    new = part.new
    last = np.zeros(len(part.sequences), dtype=np.int64)
    np.maximum.at(last, new.document, new.end)
    return np.bincount(new.rank[new.end == last[new.document]], minlength=ranks).tolist()
