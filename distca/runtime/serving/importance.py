"""Importance of a rank's tokens, which the attention of each layer tells for the next one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from distca.attention.importance import attention_given
from distca.plan import Plan
from distca.plan.span import Int64s, distinct, expand_ranges
from distca.runtime.exchange import map_indices
from distca.runtime.serving.step_exchange import Index, index_of

OBSERVERS = 64
"""Most queries of a sequence and rank that say which of its keys are important: its last ones."""


@dataclass(frozen=True)
class Observed:
    """A sequence's tokens on this rank. All indices are int64.

    Attributes:
        queries: local rows of the observing queries.
        keys: local rows of all keys.
        places: where the keys lie.
        q_positions: position of each query, `[observers]`.
        kv_positions: position of each key, `[keys]`.
    """

    queries: Index
    keys: Index
    places: Index
    q_positions: torch.Tensor
    kv_positions: torch.Tensor


class Importance:
    """Importance of a rank's tokens: see `distca.attention.importance`.

    All keys of a sequence without a query on this rank are equally important.

    Args:
        plan: plan of the layers without a window.
        rank: this rank.
        key_places: where each local key row lies, int64 `[local key rows]`.
        kv_heads: key-value heads.
        device: device of the rows.

    Attributes:
        table: importance of the local keys in the layer before, float32 `[rows, kv_heads]`.
    """

    def __init__(
        self, plan: Plan, rank: int, key_places: Int64s, kv_heads: int, device: torch.device
    ) -> None:
        self.table = torch.zeros((len(key_places), kv_heads), device=device)
        on_device = map_indices(_observed(plan, rank, key_places), lambda index: index.to(device))
        self._observed: tuple[Observed, ...] = on_device

    def update(
        self, q_THD: torch.Tensor, k_THD: torch.Tensor, lse_TH: torch.Tensor, softmax_scale: float
    ) -> None:
        """Takes in a layer.

        Args:
            q_THD: local queries.
            k_THD: keys, the local ones at their places.
            lse_TH: final LSE of the local queries.
            softmax_scale: factor of the scores.
        """
        table = torch.zeros_like(self.table)
        for each in self._observed:
            table[each.keys] = attention_given(
                q_THD[each.queries],
                k_THD[each.places],
                lse_TH[each.queries],
                each.q_positions[:, None] >= each.kv_positions[None],
                softmax_scale,
            )
        self.table = table


def _observed(plan: Plan, rank: int, key_places: Int64s) -> tuple[Observed, ...]:
    placement, observed = plan.placement, []
    rows = placement.first_rows(), placement.first_rows(plan.own_pieces)
    for document in distinct(placement.document[plan.own_pieces & (placement.rank == rank)]):
        mine = (placement.rank == rank) & (placement.document == document)
        listed = []
        for pieces, first in zip((mine, mine & plan.own_pieces), rows, strict=True):
            lengths = (placement.end - placement.start)[pieces]
            spans = (
                expand_ranges(first[pieces], lengths),
                expand_ranges(placement.start[pieces], lengths),
            )
            listed.append(spans)
        (keys, kv_positions), (queries, q_positions) = listed
        last = np.argsort(q_positions)[-OBSERVERS:]
        observed.append(
            Observed(
                index_of(queries[last]),
                index_of(keys),
                index_of(key_places[keys]),
                torch.from_numpy(q_positions[last]),
                torch.from_numpy(kv_positions),
            )
        )
    return tuple(observed)
