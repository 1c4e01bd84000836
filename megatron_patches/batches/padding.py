"""Padding, which fills what whole documents leave of a pack: tokens without any loss."""

from __future__ import annotations

import numpy as np

from distca.documents.document_list import TokenSource
from distca.plan.span import Floats, Int64s

_LONGEST = 128
"""Tokens of a document of padding, which cost little attention, but some planning each."""


class Padding(TokenSource):
    """Documents of padding: number `n` has `n + 1` tokens and no target."""

    @property
    def lengths(self) -> Int64s:
        return np.arange(1, _LONGEST + 1)

    @staticmethod
    def document(lengths: Int64s) -> Int64s:
        """Returns the numbers of the documents of some lengths."""
        return lengths - 1

    def read(self, document: int, start: int, end: int) -> Int64s:
        return np.zeros(end - start, dtype=np.int64)

    def loss_weights(self, document: int, start: int, end: int) -> Floats:
        return np.zeros(end - start)

    def place(self, document: int) -> str:
        return "padding"


def padding_lengths(tokens: int) -> Int64s:
    """Returns the lengths of the documents of padding that fill some tokens."""
    count, rest = divmod(tokens, _LONGEST)
    return np.array([_LONGEST] * count + [rest] * (rest > 0), dtype=np.int64)


def fill_packs(lengths: Int64s, pack: int) -> tuple[Int64s, Int64s]:
    """Lays documents one after the other in packs, each begun where the next doesn't fit the last.

    Args:
        lengths: tokens of the documents, each at most a pack's.
        pack: tokens of a pack.

    Returns:
        The number of each document in its new place, -1 for padding, and their lengths.
    """
    ends = np.cumsum(lengths)
    order, filled = [], []
    first = before = 0
    while first < len(lengths):
        last = int(np.searchsorted(ends, before + pack, side="right"))
        padding = padding_lengths(before + pack - int(ends[last - 1]))
        order += [np.arange(first, last), np.full_like(padding, -1)]
        filled += [lengths[first:last], padding]
        first, before = last, int(ends[last - 1])
    return np.concatenate(order), np.concatenate(filled)
