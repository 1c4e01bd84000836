"""Documents from a user's own loader, and the interface by which documents of any kind are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from distca.plan.span import Floats, Int64s

_CHECKED_DOCUMENTS = 64
"""Documents that are read to try a list."""


@runtime_checkable
class DocumentList(Protocol):
    """The documents of a split, as a loader of your own provides them.

    Every rank makes a list of its own, and all must be the same. A thread reads it, while another
    may read the list of another split.

    Attributes:
        lengths: tokens of each document, one for each document of the list.
    """

    @property
    def lengths(self) -> Sequence[int] | Int64s: ...

    def __len__(self) -> int: ...

    def tokens(self, index: int) -> Sequence[int] | Int64s:
        """Returns all tokens of a document, its end token included, `lengths[index]` of them."""
        ...


@runtime_checkable
class WeightedDocumentList(DocumentList, Protocol):
    """Documents whose tokens have different weights in the loss."""

    def loss_weights(self, index: int) -> Sequence[float] | Floats:
        """Returns a weight for each token of a document: of the loss in predicting that token.

        The loss of a global batch is the sum of its tokens' weighted losses, divided by the number
        of its tokens whose weight is not 0. The first token of a document is not predicted.
        """
        ...


class TokenSource(Protocol):
    """Documents of any kind, as the token stream reads them.

    Attributes:
        lengths: tokens of each document.
    """

    @property
    def lengths(self) -> Int64s: ...

    def read(self, document: int, start: int, end: int) -> Int64s:
        """Reads the tokens `[start, end)` of a document."""
        ...

    def loss_weights(self, document: int, start: int, end: int) -> Floats | None:
        """Reads the weights with which those tokens are predicted; None: all are 1."""
        ...

    def target_counts(self, document: int, start: int, end: int) -> Int64s:
        """Returns how often each of those tokens is a target: more than once where conversations
        share it."""
        weights = self.loss_weights(document, start, end)
        return (
            np.ones(end - start, dtype=np.int64) if weights is None else (weights != 0).astype(int)
        )

    def place(self, document: int) -> str:
        """Returns where a document comes from, for messages."""
        ...

    @property
    def shares_tokens(self) -> bool:
        """Whether documents are trees, of conversations that share tokens."""
        return False

    def tree(self, document: int) -> tuple[Int64s, Int64s]:
        """Returns the own lengths and the parents of a document's nodes, int64 `[nodes]` each, as
        `distca.schedule.training.trees` has them; an ordinary document has one."""
        return self.lengths[document : document + 1], np.full(1, -1, dtype=np.int64)


class ListedDocuments(TokenSource):
    """A user's documents, checked as they are read.

    Args:
        name: where the list comes from, for messages.
        documents: list to read.
        vocab_size: bound that token ids must be below; None: not checked.

    Raises:
        ValueError: the list has no documents, or some of its documents are not as it says.
    """

    def __init__(self, name: str, documents: DocumentList, vocab_size: int | None = None) -> None:
        self._name, self._documents, self._vocab_size = name, documents, vocab_size
        if not isinstance(documents, DocumentList):
            raise ValueError(
                f"{name} gives a {type(documents).__name__}, which is not a list of documents: it "
                "needs __len__, lengths and tokens(index) (distca.documents.document_list)"
            )
        lengths = np.asarray(documents.lengths)
        if lengths.shape != (len(documents),) or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"{name}: lengths must be one whole number for each of the {len(documents)} "
                f"documents, not {lengths.dtype} of shape {lengths.shape}"
            )
        if not (lengths > 0).any() or lengths.min() < 0:
            raise ValueError(f"{name}: lengths must not be negative, and some must be positive")
        self._lengths: Int64s = lengths.astype(np.int64)
        filled = np.flatnonzero(lengths)
        tried = filled[np.linspace(0, len(filled) - 1, _CHECKED_DOCUMENTS).astype(np.int64)]
        for document in np.unique(tried).tolist():
            self.read(document, 0, 1)
            self.loss_weights(document, 0, 1)

    @property
    def lengths(self) -> Int64s:
        return self._lengths

    def read(self, document: int, start: int, end: int) -> Int64s:
        tokens = self._column("tokens", self._documents.tokens(document), document)
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"{self.place(document)}: tokens must be ids, not {tokens.dtype}")
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or (self._vocab_size is not None and highest >= self._vocab_size):
            raise ValueError(
                f"{self.place(document)} holds the token {lowest if lowest < 0 else highest}, but "
                f"the run's vocabulary has {self._vocab_size} tokens"
            )
        return tokens[start:end].astype(np.int64)

    def loss_weights(self, document: int, start: int, end: int) -> Floats | None:
        if not isinstance(self._documents, WeightedDocumentList):
            return None
        found = self._column("loss_weights", self._documents.loss_weights(document), document)
        weights = found.astype(np.float64)
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(
                f"{self.place(document)}: loss_weights must be finite and not negative"
            )
        return weights[start:end]

    def place(self, document: int) -> str:
        return f"document {document} of {self._name}"

    def _column(self, method: str, values: ArrayLike, document: int) -> np.ndarray:
        """Returns what a method gave for a document, which must be a value for each token."""
        column, length = np.asarray(values), int(self._lengths[document])
        if column.shape != (length,):
            raise ValueError(
                f"{self.place(document)}: {method} has the shape {column.shape}, but lengths says "
                f"that it has {length} tokens"
            )
        return column
