"""A token stream of documents of which only the lengths matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY = 511


@dataclass(frozen=True)
class LengthsOnly:
    """A corpus of which only the lengths matter."""

    lengths: np.ndarray

    def read(self, document: int, start: int, end: int) -> np.ndarray:
        return (np.arange(start, end) * 7 + document) % VOCABULARY


def stream_of(lengths: Sequence[int]) -> Any:
    """A `TokenStream` of such documents, one after the other."""
    from megatron_patches.stream import TokenStream

    column = np.asarray(lengths, dtype=np.int64)
    numbers, zeros = np.arange(len(column)), np.zeros_like(column)
    offsets = np.concatenate([[0], np.cumsum(column)])
    corpora = (LengthsOnly(column),)
    return TokenStream(corpora, zeros, numbers, zeros, offsets)  # type: ignore[arg-type]
