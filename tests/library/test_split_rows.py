"""Documents of packed and padded rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distca.library import IGNORED, Document, share_documents, split_rows

TOKENS = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]])
POSITIONS = torch.tensor([[0, 1, 0, 1, 2], [3, 4, 0, 1, 2]])
KEPT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


def nested() -> torch.Tensor:
    """Rows of other lengths."""
    rows: torch.Tensor = torch.nested.nested_tensor([*TOKENS], layout=torch.jagged)
    return rows


def listed(documents: list[Document]) -> list[tuple[list[int], list[int]]]:
    return [(each.tokens.tolist(), each.next_tokens.tolist()) for each in documents]


def test_a_row_is_a_document_without_its_padding() -> None:
    found = split_rows(TOKENS, TOKENS, shifted=False, kept_BT=KEPT)
    assert listed(found) == [
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, IGNORED]),
        ([1, 2, 3, 4], [2, 3, 4, IGNORED]),
    ]


def test_a_document_begins_at_position_0_and_where_a_row_begins() -> None:
    """The second row begins within a document, which the row before does not end with."""
    labels = TOKENS.int().clone()
    labels[0, 4] = IGNORED
    found = split_rows(TOKENS.int(), labels, shifted=False, positions_BT=POSITIONS, kept_BT=KEPT)
    assert listed(found) == [
        ([5, 6], [6, IGNORED]),
        ([7, 8, 9], [8, IGNORED, IGNORED]),
        ([1, 2], [2, IGNORED]),
        ([3, 4], [4, IGNORED]),
    ]


def test_shifted_labels_are_targets() -> None:
    labels = torch.tensor([[6, 1, 8, IGNORED, 3], [2, 3, 4, 5, IGNORED]])
    found = split_rows(TOKENS, labels, shifted=True, positions_BT=POSITIONS)
    assert listed(found) == [
        ([5, 6], [6, 1]),
        ([7, 8, 9], [8, IGNORED, 3]),
        ([1, 2], [2, 3]),
        ([3, 4, 0], [4, 5, IGNORED]),
    ]


def test_padding_on_the_left_and_rows_of_padding() -> None:
    kept = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    found = split_rows(TOKENS, TOKENS, shifted=False, kept_BT=kept)
    assert listed(found) == [([7, 8, 9], [8, 9, IGNORED])]
    assert split_rows(TOKENS, TOKENS, shifted=False, kept_BT=torch.zeros_like(kept)) == []


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tokens_BT": TOKENS.float()}, "tokens are torch.float32: give a tensor of integers"),
        ({"labels_BT": [[1]]}, "labels are a list: give a tensor of integers"),
        ({"labels_BT": TOKENS[:, 1:]}, r"labels are \[2, 4\], and tokens \[2, 5\]"),
        ({"tokens_BT": TOKENS[0], "labels_BT": TOKENS[0]}, r"tokens are \[5\]: give \[rows, t"),
        ({"positions_BT": POSITIONS[:1]}, r"positions are \[1, 5\], and tokens \[2, 5\]"),
        ({"kept_BT": KEPT.float()}, "kept are torch.float32"),
        ({"shifted": True}, "a document's targets are its own tokens"),
        ({"tokens_BT": TOKENS > 5}, "tokens are torch.bool: give a tensor of integers"),
        ({"labels_BT": TOKENS > 5}, "labels are torch.bool: give a tensor of integers"),
        ({"tokens_BT": -TOKENS}, "a document has a negative token: give targets of IGNORED"),
        ({"tokens_BT": nested()}, "tokens are a nested or sparse tensor: give a dense one"),
        ({"labels_BT": TOKENS.to_sparse()}, "labels are a nested or sparse tensor: give a dense"),
        ({"tokens_BT": TOKENS.to("meta")}, "tokens are on the meta device: give a tensor with"),
        ({"kept_BT": KEPT.to("meta")}, "kept are on the meta device: give a tensor with values"),
    ],
)
def test_other_rows_are_refused(given: dict[str, Any], why: str) -> None:
    arguments: dict[str, Any] = {"tokens_BT": TOKENS, "labels_BT": TOKENS, "shifted": False}
    with pytest.raises(ValueError, match=why):
        split_rows(**arguments | given)


def test_padding_may_be_any_integer() -> None:
    tokens = torch.where(KEPT.bool(), TOKENS, -1)
    found = split_rows(tokens, TOKENS, shifted=False, kept_BT=KEPT)
    assert listed(found) == listed(split_rows(TOKENS, TOKENS, shifted=False, kept_BT=KEPT))


@pytest.mark.parametrize(
    ("tokens", "labels", "why"),
    [
        (TOKENS[0], [5, 6, 7, 8, 9], "a document's labels are a list: give a tensor, int64"),
        (TOKENS[0], TOKENS[0, 0], r"a document's labels are torch.int64 \[\] on cpu"),
        (TOKENS[0], TOKENS[0].to("meta"), "a document's labels are on the meta device"),
        (TOKENS[0].to_sparse(), TOKENS[0], "a document's tokens are a nested or sparse tensor"),
        (TOKENS[0] - 6, TOKENS[0] - 6, "a document has a negative token"),
    ],
)
def test_other_labels_are_refused(tokens: Any, labels: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Document.from_labels(tokens, labels)


def test_documents_are_shared_by_processes_of_a_group() -> None:
    with pytest.raises(RuntimeError, match=r"not initialised: call torch\.distributed\.init_proc"):
        share_documents([TOKENS[0]])
