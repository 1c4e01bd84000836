"""Plans of all layers of a prefill: one for each mask, and those of layers that drop rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distca.plan import Mask, Placement, SteppedPlan
from distca.plan.span import Bools, Floats
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.selection import Selector
from distca.schedule.serving.steps import Strategy, step_plan

PrefillStrategy = Strategy | Selector | NearToFar | BalancedTiles
"""What travels in prefills, or who chooses it, or how keys travel from near to far, or how ranks
share the attention of prompts that each of them has."""

_FULL = Mask()


@dataclass(frozen=True)
class LayerPlans:
    """Plans of a prefill's layers.

    Attributes:
        by_mask: plan of the layers of each mask that drop nothing.
        sparse: plan of each layer that drops rows, by its number.
    """

    by_mask: Mapping[Mask, SteppedPlan]
    sparse: Mapping[int, SteppedPlan] = field(default_factory=dict)

    def of(self, layer: int, mask: Mask) -> SteppedPlan:
        return self.sparse.get(layer) or self.by_mask[mask]


def plan_layers(
    held: Placement,
    new: Placement,
    masks: Sequence[Mask],
    strategy: PrefillStrategy,
    dense: Bools | None = None,
    head_groups: int = 1,
    busy: Mapping[Mask, Floats] | None = None,
) -> LayerPlans:
    """Plans the layers of a prefill.

    Args:
        held: who holds the keys and values of earlier tokens.
        new: owners of the new tokens.
        masks: masks of the model's layers.
        strategy: what travels.
        dense: sequences that drop nothing, bool `[sequences]`, or None.
        head_groups: groups that heads are scattered in, if they are.
        busy: seconds in which each rank computes attention of decoded tokens, in layers of each
            mask, `[ranks]`, or None.
    """
    if isinstance(strategy, BalancedTiles):
        waits = busy or {}
        return LayerPlans({mask: strategy.plan(held, new, mask, waits.get(mask)) for mask in masks})
    if isinstance(strategy, NearToFar):
        plans = {mask: strategy.plan(held, new, mask) for mask in masks}
        full = plans.get(_FULL)
        sparse = {} if full is None else strategy.sparse_plans(full, dense)
        return LayerPlans(plans, sparse)

    def planned(strategy: Strategy, mask: Mask = _FULL) -> SteppedPlan:
        return step_plan(held, new, strategy, mask, in_steps=True, head_groups=head_groups)

    # Under a window little travels, whatever the strategy: layers without one decide.
    chosen = strategy
    if not isinstance(chosen, str):
        chosen = chosen.choose(held, new, planned)
    return LayerPlans({mask: planned(chosen, mask) for mask in masks})
