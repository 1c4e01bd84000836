"""A step of a model's inference, as all ranks know it before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distca.inference.models import ServedModel
from distca.schedule.serving.blocks import NewBlocks
from distca.schedule.serving.csps.layouts import SharedRows
from distca.schedule.serving.decode import DecodeBatch
from distca.schedule.serving.iteration import bytes_by_sequence
from distca.schedule.serving.prefill_batch import PrefillBatch


@dataclass(frozen=True)
class Step:
    """What all ranks know of a step before it runs.

    Attributes:
        parts: prefills and decoded tokens; in each layer their attention runs in this order.
        blocks: blocks that it adds to sequences.
        shared: how ranks that split weights share its rows; None: each has all.
    """

    parts: tuple[PrefillBatch | DecodeBatch, ...]
    blocks: NewBlocks = field(default_factory=dict)
    shared: SharedRows | None = None

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequences that the step feeds, those of one part after the other."""
        return tuple(sequence for part in self.parts for sequence in part.sequences)

    def bytes_by_sequence(self, model: ServedModel) -> list[int]:
        """Bytes that the step moves for each sequence, in all layers, by its plans."""
        size = model.tensor_parallel_size
        found = bytes_by_sequence(self.parts, model.windows, model.shape, size)
        if self.shared is not None:
            tokens = [np.sum(part.rows - part.before, axis=1) for part in self.parts]
            found = (self.shared.bytes_by_sequence(np.concatenate(tokens)) + found).tolist()
        return found
