"""New tokens of sequences that a step prefills, with the plans of their attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.cost.step_bytes import stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, SteppedPlan
from distca.plan.span import Int64s
from distca.schedule.serving.layer_plans import LayerPlans


@dataclass(frozen=True)
class PrefillBatch:
    """Prompts, turns or chunks of either that a step feeds together.

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
        found = {*self.new.rank.tolist()}
        for stepped in self.plans.by_mask.values():
            found |= {*stepped.plan.tasks.server.tolist()}
            for segments in (stepped.plan.q_segments, stepped.kv_segments):
                found |= {*segments.owner.tolist()}
        return found

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
        found = [
            n * _bytes(plan, whole) if plan.drops else n * tensor_ranks * _bytes(plan, shape)
            for plan, n in ((plans[each], n) for each, n in times.items())
        ]
        return np.sum(found, axis=0)


def _bytes(stepped: SteppedPlan, shape: AttentionShape) -> Int64s:
    """Returns the bytes that a layer moves for each sequence, int64 `[sequences]`."""
    plan = stepped.plan
    sequence = plan.tasks.document % plan.sequences
    parts = (stepped.select(sequence == n) for n in range(plan.sequences))
    return np.array([stepped_bytes(each, shape).total for each in parts], dtype=np.int64)
