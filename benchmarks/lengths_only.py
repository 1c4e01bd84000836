"""Token streams of documents that matter by their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY = 511


@dataclass(frozen=True)
class LengthsOnly:
    """A corpus of given document lengths, whose tokens are made up."""

    lengths: np.ndarray

    shares_tokens = False

    def read(self, document: int, start: int, end: int) -> np.ndarray:
        return (np.arange(start, end) * 7 + document) % VOCABULARY

    def loss_weights(self, document: int, start: int, end: int) -> None:
        """See `TokenSource.loss_weights`: all tokens have the same weight."""


def stream_of(lengths: Sequence[int]) -> Any:
    """Makes a `TokenStream` of `LengthsOnly` documents, one after the other."""
    from megatron_patches.batches.stream import TokenStream

    column = np.asarray(lengths, dtype=np.int64)
    numbers, zeros = np.arange(len(column)), np.zeros_like(column)
    offsets = np.concatenate([[0], np.cumsum(column)])
    corpora = (LengthsOnly(column),)
    return TokenStream(corpora, zeros, numbers, zeros, offsets)  # type: ignore[arg-type]
