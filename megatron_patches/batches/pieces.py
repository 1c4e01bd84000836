"""Pieces of documents, and the order in which training reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from distca.plan.span import Int64s, expand_ranges

_MOST_PIECES = 1 << 30
"""Pieces of documents that a run can read: a table in memory has a few numbers for each."""


def pieces_of(
    documents: Int64s, lengths: Int64s, max_document_length: int | None
) -> tuple[Int64s, Int64s, Int64s]:
    """Returns document, first position and length of each piece, from all documents' lengths."""
    whole = lengths[documents]
    longest = int(whole.max()) if max_document_length is None else max_document_length
    counts = -(-whole // longest)
    first = expand_ranges(np.zeros_like(counts), counts) * longest
    return (
        np.repeat(documents, counts),
        first,
        np.minimum(np.repeat(whole, counts) - first, longest),
    )


def shuffled_epochs(lengths: Int64s, wanted: int, seed: tuple[int, int]) -> Int64s:
    """Returns the order of pieces in training: shuffled epochs of at least `wanted` tokens."""
    per_epoch = int(lengths.sum())
    passes = wanted / per_epoch
    if passes * len(lengths) > _MOST_PIECES:
        raise ValueError(
            f"the run reads {wanted:.3g} tokens, each document {passes:.3g} times: lower "
            "--train-iters (or --train-samples, --eval-iters), or give more text"
        )
    epochs: list[Any] = []
    while len(epochs) * per_epoch < wanted:
        generator = np.random.default_rng((*seed, len(epochs)))
        epochs.append(generator.permutation(len(lengths)))
    order = np.concatenate(epochs)
    reached = np.cumsum(lengths[order])
    return order[: int(np.searchsorted(reached, wanted)) + 1]
