"""Cost of core attention in a mean layer, where some layers have windows and others have none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.model_sizes import ModelSize
from distca.plan import Mask
from distca.plan.span import Floats, Int64s


@dataclass(frozen=True)
class LayerMean:
    """A `CostModel` of tasks whose queries end where their keys do, from a document's start.

    Such are the tasks of baselines: whole documents, and the heads and tails of those that ranks
    share. Ranks wait for each other in every layer; here they do so for the sum of all layers,
    which is to the baselines' advantage.

    Attributes:
        attention: forward seconds of tasks.
        masks: masks of the layers, and the share of the layers that have each.
    """

    attention: CostModel
    masks: tuple[tuple[Mask, float], ...]

    @staticmethod
    def of(attention: CostModel, model: ModelSize) -> CostModel:
        """Returns the cost of a mean layer of a model; where all layers see all, that of any."""
        masks = model.masks
        layers = [masks.of_layer(number) for number in range(model.layers)]
        if set(layers) == {Mask()}:
            return attention
        shares = [(mask, layers.count(mask) / len(layers)) for mask in dict.fromkeys(layers)]
        return LayerMean(attention, tuple(shares))

    @property
    def description(self) -> str:
        return f"{self.attention.description}, a mean of layers with and without windows"

    def seconds(self, q_len: Int64s, kv_len: Int64s, pairs: Int64s) -> Floats:
        """See `CostModel.seconds`; `pairs` are those without a window."""
        q, kv = np.asarray(q_len, dtype=np.int64), np.asarray(kv_len, dtype=np.int64)
        zeros, total = np.zeros_like(kv), np.zeros(kv.shape)
        for mask, share in self.masks:
            seen = np.minimum(pairs, mask.pairs(kv - q, kv, zeros, kv))
            total = total + share * self.attention.seconds(q, kv, seen)
        return total
