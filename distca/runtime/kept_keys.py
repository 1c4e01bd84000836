"""Keys and values that a rank keeps from step to step of inference, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_GROWTH = 1.5


class KeptRows:
    """Rows `[rows, heads, head_dim]` that are appended to; memory grows ahead of them.

    Args:
        like: rows whose heads, dtype and device all rows have.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._memory = like.new_empty((0, *like.shape[1:]))
        self._count = 0

    def append(self, rows: torch.Tensor) -> None:
        """Adds rows behind those that are kept."""
        needed = self._count + len(rows)
        if needed > len(self._memory):
            grown = rows.new_empty((max(needed, int(_GROWTH * needed)), *rows.shape[1:]))
            grown[: self._count] = self.rows
            self._memory = grown
        self._memory[self._count : needed] = rows
        self._count = needed

    @property
    def rows(self) -> torch.Tensor:
        """All rows that are kept, a view."""
        return self._memory[: self._count]


class KeptKeys:
    """A rank's keys and values of one layer, by sequence, in the order of positions.

    Earlier positions never follow later ones, so the rows of a sequence are in the order of the
    pieces that `distca.schedule.serving` places on the rank.
    """

    def __init__(self) -> None:
        self._keys: dict[int, KeptRows] = {}
        self._values: dict[int, KeptRows] = {}

    def append(
        self, sequences: Sequence[int], counts: Sequence[int], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Adds a step's rows.

        Args:
            sequences: sequences of the step, in the order of their rows.
            counts: new rows of each on this rank, some of them none.
            k: keys, `[sum(counts), kv_heads, head_dim]`.
            v: values, likewise.
        """
        for kept, rows in ((self._keys, k), (self._values, v)):
            for sequence, part in zip(sequences, torch.split(rows, list(counts)), strict=True):
                if sequence not in kept:
                    kept[sequence] = KeptRows(rows)
                kept[sequence].append(part)

    def of(self, sequences: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of sequences, one after the other; of one alone no copy."""
        if len(sequences) == 1:
            (only,) = sequences
            return self._keys[only].rows, self._values[only].rows
        return (
            torch.cat([self._keys[each].rows for each in sequences]),
            torch.cat([self._values[each].rows for each in sequences]),
        )

    def drop(self, sequence: int) -> None:
        """Frees what is kept of a sequence."""
        self._keys.pop(sequence, None)
        self._values.pop(sequence, None)
