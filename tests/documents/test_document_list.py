"""Documents from a user's own loader: what is read of them, and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from distca.documents.document_list import ListedDocuments, WeightedDocumentList


class Numbers:
    """Documents of the numbers from 0 on."""

    def __init__(self, lengths: Any, **given: Any) -> None:
        self.lengths = lengths
        self._given = given

    def __len__(self) -> int:
        return self._given.get("count", len(self.lengths))

    def tokens(self, index: int) -> Any:
        return self._given.get("tokens", np.arange(self.lengths[index]))


class Weighted(Numbers):
    def loss_weights(self, index: int) -> Any:
        return self._given.get("weights", [0.5] * self.lengths[index])


def test_ranges_of_documents_are_read() -> None:
    documents = ListedDocuments("mine", Numbers([3, 0, 5]), vocab_size=5)
    assert documents.lengths.tolist() == [3, 0, 5]
    found = documents.read(2, 1, 4)
    assert (found.dtype, found.tolist()) == (np.int64, [1, 2, 3])
    assert documents.loss_weights(2, 1, 4) is None
    assert documents.place(2) == "document 2 of mine"


def test_weights_are_read_with_them() -> None:
    weighted = Weighted([3], weights=[0, 0.5, 1])
    assert isinstance(weighted, WeightedDocumentList)
    found = ListedDocuments("mine", weighted).loss_weights(0, 1, 3)
    assert found is not None
    assert found.tolist() == [0.5, 1]


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([[1, 2]], "mine gives a list, which is not a list of documents: it needs __len__,"),
        (Numbers([3, 4], count=3), "one whole number for each of the 3 documents"),
        (Numbers([3.0, 4.0]), "one whole number for each of the 2 documents, not float64"),
        (Numbers([0, 0]), "some must be positive"),
        (Numbers([3, -1]), "must not be negative"),
        (Numbers([3], tokens=[1, 2]), r"document 0 of mine: tokens has the shape \(2,\), but"),
        (Numbers([2], tokens=[0.5, 1.0]), "tokens must be ids, not float64"),
        (Numbers([6]), "document 0 of mine holds the token 5, but the run's vocabulary has 5"),
        (Numbers([2], tokens=[-1, 3]), "holds the token -1"),
        (Weighted([3], weights=[1.0]), r"loss_weights has the shape \(1,\), but"),
        (Weighted([2], weights=[1.0, np.nan]), "must be finite and not negative"),
        (Weighted([2], weights=[1.0, -1.0]), "must be finite and not negative"),
    ],
)
def test_what_is_not_as_it_says_is_refused(documents: Sequence[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ListedDocuments("mine", documents, vocab_size=5)  # type: ignore[arg-type]


def test_a_document_that_was_not_tried_is_checked_when_it_is_read() -> None:
    documents = Numbers([2] * 1000)
    listed = ListedDocuments("mine", documents, vocab_size=5)
    documents._given["tokens"] = [7, 7]
    with pytest.raises(ValueError, match="document 501 of mine holds the token 7"):
        listed.read(501, 0, 1)
