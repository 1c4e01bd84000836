"""Decode steps: one new token of each of many sequences, in operations on one row a sequence.

It is the plan that `step_plan` makes of pass-Q, told by numbers of rows instead of tasks: a query
meets, on each rank, all rows that the rank has of its sequence, or under a window the last of them.
Since rows lie in the order of positions, two numbers say which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement
from distca.plan.span import Bools, Int64s


@dataclass(frozen=True)
class DecodeBatch:
    """A step that feeds one token of each of some sequences.

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
