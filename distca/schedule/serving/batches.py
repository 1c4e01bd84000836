"""What one iteration feeds, a batch of prefills and one of decoded tokens, and their layers' plans.

Prefills have a plan for each mask of the layers, and one for each layer that drops rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from distca.cost.steps import stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, SteppedPlan
from distca.plan.span import Bools, Floats, Int64s
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.csps.layouts import SharedRows
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


@dataclass(frozen=True)
class PrefillBatch:
    """Prompts, turns or chunks of either that are fed together, with the plans of their attention.

    Attributes:
        sequences: sequences that are fed, by number, in the order of the plans' documents.
        plans: plans of the layers.
        new: owners of the new tokens.
        before: rows of each sequence on each rank before, int64 `[sequences, ranks]`.
    """

    sequences: tuple[int, ...]
    plans: LayerPlans
    new: Placement
    before: Int64s

    @cached_property
    def rows(self) -> Int64s:
        """Rows of each sequence on each rank afterwards, int64 `[sequences, ranks]`."""
        after = self.before.copy()
        np.add.at(after, (self.new.document, self.new.rank), self.new.end - self.new.start)
        return after

    def members(self) -> set[int]:
        """Returns the ranks that own new tokens, or compute or send something."""
        ranks = {*self.new.rank.tolist()}
        for stepped in self.plans.by_mask.values():
            ranks |= {*stepped.plan.tasks.server.tolist()}
            # Ranks need the rows of the steps later, unless some are dropped.
            both = (stepped.plan.q_segments, stepped.kv_segments) if stepped.drops else ()
            for segments in both or [rows for each in stepped.step_segments for rows in each[:2]]:
                ranks |= {*segments.owner.tolist()}
        return ranks

    def bytes_by_sequence(
        self, windows: Sequence[int | None], shape: AttentionShape, tensor_ranks: int
    ) -> Int64s:
        """Returns the bytes that all layers move for each sequence, int64 `[sequences]`.

        Args:
            windows: for each layer how many earlier tokens a query sees; None: all.
            shape: heads of one tensor-parallel rank.
            tensor_ranks: tensor-parallel ranks, whose bytes are added up.
        """
        # A plan that drops rows has the heads of all tensor-parallel ranks.
        whole = replace(
            shape, heads=tensor_ranks * shape.heads, kv_heads=tensor_ranks * shape.kv_heads
        )
        layers = [self.plans.of(layer, Mask(window)) for layer, window in enumerate(windows)]
        plans, times = {id(plan): plan for plan in layers}, Counter(map(id, layers))
        of_plans = [
            n * _bytes(plan, whole) if plan.drops else n * tensor_ranks * _bytes(plan, shape)
            for plan, n in ((plans[each], n) for each, n in times.items())
        ]
        return np.sum(of_plans, axis=0)


@dataclass(frozen=True)
class DecodeBatch:
    """One new token of each of many sequences, in operations on one row a sequence.

    It is the plan that `step_plan` makes of pass-Q, as numbers of rows instead of tasks: a
    query meets, on each rank, all rows that the rank has of its sequence, or under a window the
    last of them. Since rows lie in the order of positions, two numbers say which.

    Attributes:
        sequences: sequences that are fed.
        positions: position of each one's new token, int64 `[sequences]`.
        owners: rank that runs the token's layers and keeps its keys and values, likewise.
        before: rows of each sequence on each rank before the step, int64 `[sequences, ranks]`.
        hidden: rows among those, the first ones, that the query does not see, by mask.
    """

    sequences: tuple[int, ...]
    positions: Int64s
    owners: Int64s
    before: Int64s
    hidden: Mapping[Mask, Int64s]

    @cached_property
    def rows(self) -> Int64s:
        """Rows of each sequence on each rank after the step, int64 `[sequences, ranks]`."""
        after = self.before.copy()
        after[np.arange(len(self.owners)), self.owners] += 1
        return after

    @property
    def new(self) -> Placement:
        """Owners of the new tokens."""
        numbers = np.arange(len(self.owners))
        return Placement(
            numbers, self.positions, self.positions + 1, self.owners, self.before.shape[1]
        )

    def away(self, mask: Mask) -> Bools:
        """Returns whether each sequence's query travels to each rank, bool `[sequences, ranks]`."""
        travels = self.rows > self.hidden[mask]
        travels[np.arange(len(self.owners)), self.owners] = False
        return travels

    def bytes_by_sequence(self, mask: Mask, shape: AttentionShape) -> Int64s:
        """Returns the bytes that a layer moves for each sequence: queries there, outputs and LSE
        back."""
        row = shape.round_trip_bytes
        return self.away(mask).sum(axis=1) * row  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Batch:
    """What all ranks know of an iteration before it runs.

    Attributes:
        parts: prefills and decoded tokens; in each layer their attention runs in this order.
        shared: how ranks that split weights share the rows; None: each has all.
    """

    parts: tuple[PrefillBatch | DecodeBatch, ...]
    shared: SharedRows | None = None

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequences that are fed, those of one part after the other."""
        return tuple(sequence for part in self.parts for sequence in part.sequences)

    def bytes_by_sequence(
        self, windows: Sequence[int | None], shape: AttentionShape, tensor_ranks: int
    ) -> list[int]:
        """Returns the bytes that all layers move for each sequence, by the plans.

        Args:
            windows: for each layer how many earlier tokens a query sees; None: all.
            shape: heads of one tensor-parallel rank.
            tensor_ranks: tensor-parallel ranks, whose bytes are added up.
        """
        moved_bytes: list[int] = []
        for part in self.parts:
            if isinstance(part, PrefillBatch):
                moved = part.bytes_by_sequence(windows, shape, tensor_ranks)
            else:
                of_masks = [
                    count * part.bytes_by_sequence(Mask(window), shape)
                    for window, count in Counter(windows).items()
                ]
                moved = tensor_ranks * np.sum(of_masks, axis=0)
            moved_bytes += moved.tolist()
        if self.shared is not None:
            tokens = [np.sum(part.rows - part.before, axis=1) for part in self.parts]
            moved_bytes = (
                self.shared.bytes_by_sequence(np.concatenate(tokens)) + moved_bytes
            ).tolist()
        return moved_bytes


def _bytes(stepped: SteppedPlan, shape: AttentionShape) -> Int64s:
    """Returns the bytes that a layer moves for each sequence, int64 `[sequences]`."""
    plan = stepped.plan
    sequence = plan.tasks.document % plan.sequences
    parts = (stepped.select(sequence == n) for n in range(plan.sequences))
    return np.array([stepped_bytes(each, shape).total for each in parts], dtype=np.int64)
