"""Rows of a layer of a chunk on their way into an engine's blocks.

Ranks that share layers have some heads each. An engine writes rows of all of its heads at once, so
heads that come first wait here for the others of their rows. They are copies in the memory of the
host: whatever they came in is free at once, and no rank waits for another one's heads.
"""

from __future__ import annotations

import numpy as np
import torch

from distca.plan.span import Int64s
from distca.prefill.inbox import RowForm


class LayerRows:
    """The rows of one layer and chunk that have arrived so far.

    Args:
        count: rows of the chunk.
        form: form of whole rows.
    """

    def __init__(self, count: int, form: RowForm) -> None:
        self._count, self._form = count, form
        self._come = np.zeros((count, len(form.heads)), dtype=np.bool_)
        self._given = np.zeros(count, dtype=np.bool_)
        self._parts: torch.Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether all rows were given out."""
        return bool(self._given.all())

    def take(
        self, index: Int64s, heads: range, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[Int64s, torch.Tensor, torch.Tensor]:
        """Takes some heads of some rows; returns the rows all of whose heads have come by that.

        Args:
            index: rows of the chunk, int64 `[rows]`.
            heads: heads of the model that came.
            keys: `[rows, heads, head_dim]`, which are read before this returns.
            values: likewise.

        Returns:
            Rows of the chunk, and their keys and values of all heads of the form.
        """
        if heads == self._form.heads:
            self._given[index] = True
            return index, keys, values
        first = heads.start - self._form.heads.start
        own = slice(first, first + len(heads))
        if self._parts is None:
            shape = 2, self._count, *self._form.shape
            self._parts = torch.empty(shape, dtype=self._form.dtype)
        rows = torch.from_numpy(index)
        for part, came in zip(self._parts, (keys, values), strict=True):
            part[rows, own] = came.cpu()
        self._come[index, own] = True
        whole = index[self._come[index].all(axis=1) & ~self._given[index]]
        self._given[whole] = True
        taken = self._parts[:, torch.from_numpy(whole)]
        return whole, taken[0], taken[1]
