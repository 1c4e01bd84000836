"""The token stream of a split: documents in training order, whatever reads them.

Its order depends on the data, the weights and the seed alone: not on the number of ranks, the
sequence length or how much of it is asked for. Labels belong to the documents, too: a token's
target is the next token of its document wherever windows and ranks cut, and the last token of a
document has none.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list

from distca.plan.span import Int64s

SPLITS = ("train", "valid", "test")
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = 9 + 8 + 1 + 8 + 8
_SAMPLED_DOCUMENTS = 64
"""Documents whose token ids are checked against the vocabulary when a dataset is opened."""


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float]]:
    """Prefixes and weights of Megatron's `--data-path`: `a`, `a b` or `0.3 a 0.7 b`.

    Raises:
        ValueError: it is empty, or a weight is not positive.
    """
    if not data_path:
        raise ValueError("--data-path is empty: give the prefix of an indexed dataset")
    prefixes, weights = get_blend_from_list(list(data_path))
    weights = [1.0] * len(prefixes) if weights is None else [float(w) for w in weights]
    if min(weights) <= 0:
        raise ValueError(f"--data-path weights {weights}: every weight must be positive")
    return list(prefixes), weights


def split_documents(split: str, which: str, documents: int) -> tuple[int, int]:
    """The documents `[first, last)` of a split, as Megatron's `--split 969,30,1` divides them.

    Raises:
        ValueError: the split cannot be read, or sums to nothing.
    """
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    shares = (shares + [0.0, 0.0])[:3] if shares else []
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"--split {split!r}: give three shares, such as 969,30,1")
    edges = [round(sum(shares[:n]) / sum(shares) * documents) for n in range(4)]
    number = SPLITS.index(which)
    return edges[number], edges[number + 1]


class Corpus:
    """One indexed dataset (`.bin` and `.idx`) as documents of tokens.

    Args:
        prefix: the path without `.bin` or `.idx`.
        vocab_size: token ids must be below it; None: not checked.

    Raises:
        ValueError: a file is missing, truncated or corrupt, or of another vocabulary.
    """

    def __init__(self, prefix: str, vocab_size: int | None = None) -> None:
        self.prefix = prefix
        _check_files(prefix)
        self._dataset = IndexedDataset(prefix, multimodal=False, mmap=True)
        edges = np.asarray(self._dataset.document_indices, dtype=np.int64)
        before = np.zeros(len(self._dataset.sequence_lengths) + 1, dtype=np.int64)
        np.cumsum(self._dataset.sequence_lengths, out=before[1:])
        self._first_sequence = edges[:-1]
        self._last_sequence = edges[1:]
        self.lengths: Int64s = before[edges[1:]] - before[edges[:-1]]
        if vocab_size is not None:
            self._check_vocabulary(vocab_size)

    def read(self, document: int, start: int, end: int) -> np.ndarray:
        """The tokens `[start, end)` of a document, int64."""
        first, last = int(self._first_sequence[document]), int(self._last_sequence[document])
        if last - first == 1:
            return self._dataset.get(first, offset=start, length=end - start).astype(np.int64)
        whole = np.concatenate([self._dataset.get(sequence) for sequence in range(first, last)])
        return whole[start:end].astype(np.int64)

    def _check_vocabulary(self, vocab_size: int) -> None:
        sidecar = Path(self.prefix + ".json")
        if sidecar.is_file():
            made_for = json.loads(sidecar.read_text()).get("vocab_size")
            if made_for is not None and made_for > vocab_size:
                raise ValueError(
                    f"{self.prefix} was made with a vocabulary of {made_for} tokens, but the run's "
                    f"has {vocab_size}: give the tokenizer that it was made with"
                )
        filled = np.flatnonzero(self.lengths)
        sample = filled[np.linspace(0, len(filled) - 1, _SAMPLED_DOCUMENTS).astype(int)]
        for document in np.unique(sample) if len(filled) else ():
            largest = int(self.read(int(document), 0, int(self.lengths[document])).max())
            if largest >= vocab_size:
                raise ValueError(
                    f"{self.prefix} holds the token {largest} (document {document}), but the run's "
                    f"vocabulary has {vocab_size} tokens: give the tokenizer that it was made with"
                )


def _check_files(prefix: str) -> None:
    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            raise ValueError(
                f"{prefix}{suffix} does not exist: --data-path takes the prefix of an indexed "
                "dataset (make one with `python -m data.prepare`)"
            )
    index, size = Path(prefix + ".idx"), Path(prefix + ".idx").stat().st_size
    with index.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or header[:9] != _INDEX_MAGIC:
        raise ValueError(f"{index} is no index of an indexed dataset, or is cut off: make it again")
    version, code, sequences, documents = struct.unpack("<QBQQ", header[9:])
    expected = _HEADER_BYTES + sequences * (4 + 8) + documents * 8
    if version != 1 or code not in {kind.value for kind in DType} or size < expected:
        raise ValueError(
            f"{index} is corrupt or cut off ({size} bytes, version {version}; {sequences} "
            f"sequences need {expected} bytes): make it again"
        )
    with index.open("rb") as file:
        file.seek(_HEADER_BYTES)
        lengths = np.fromfile(file, dtype=np.int32, count=sequences)
        pointers = np.fromfile(file, dtype=np.int64, count=sequences)
    item = DType.size(int(code))
    needed = int((pointers + lengths.astype(np.int64) * item).max()) if sequences else 0
    have = Path(prefix + ".bin").stat().st_size
    if (lengths < 0).any() or (pointers < 0).any() or have < needed:
        raise ValueError(
            f"{prefix}.bin has {have} bytes, but its index points at {needed}: it is cut off or of "
            "another dataset; make both again"
        )


@dataclass(frozen=True)
class TokenStream:
    """The documents of a split in training order, laid one after the other.

    Attributes:
        corpora: where they come from.
        corpus: for each document of the stream its corpus, int64 `[documents]`.
        document: its number in that corpus.
        offsets: where it starts in the stream, int64 `[documents + 1]`.
    """

    corpora: tuple[Corpus, ...]
    corpus: Int64s
    document: Int64s
    offsets: Int64s

    @staticmethod
    def open(
        prefixes: Sequence[str],
        weights: Sequence[float],
        *,
        split: str,
        which: Literal["train", "valid", "test"],
        seed: int,
        num_tokens: int,
        vocab_size: int | None = None,
    ) -> TokenStream:
        """Opens the datasets and orders their documents.

        Each corpus is shuffled anew for each of its epochs. Several corpora are interleaved so
        that at any point of the stream their tokens stand in the proportion of the weights.

        Args:
            prefixes: paths without `.bin` or `.idx`.
            weights: shares of the tokens, one for each prefix.
            split: Megatron's `--split`.
            which: the split to open.
            seed: of the shuffling.
            num_tokens: how far the stream must reach, at least.
            vocab_size: see `Corpus`.

        Raises:
            ValueError: see `Corpus`; or the split has no documents.
        """
        corpora = tuple(Corpus(prefix, vocab_size) for prefix in prefixes)
        tables = []
        for number, (corpus, weight) in enumerate(zip(corpora, weights, strict=True)):
            first, last = split_documents(split, which, len(corpus.lengths))
            candidates = first + np.flatnonzero(corpus.lengths[first:last])
            if len(candidates) == 0:
                raise ValueError(
                    f"the {which} split of {corpus.prefix} is empty: its {len(corpus.lengths)} "
                    f"documents under --split {split} leave it none; give it a larger share"
                )
            wanted = int(np.ceil(num_tokens * weight / sum(weights))) + 1
            order = _shuffled_epochs(candidates, corpus.lengths, wanted, (seed, number))
            lengths = corpus.lengths[order]
            progress = (np.cumsum(lengths) - lengths) / weight
            tables.append((np.full_like(order, number), order, lengths, progress))
        corpus_column, document, lengths, progress = (
            np.concatenate(column) for column in zip(*tables, strict=True)
        )
        by = np.lexsort((corpus_column, progress))
        offsets = np.zeros(len(by) + 1, dtype=np.int64)
        np.cumsum(lengths[by], out=offsets[1:])
        return TokenStream(corpora, corpus_column[by], document[by], offsets)

    def document_lengths(
        self, start: int, stop: int, max_document_length: int | None = None
    ) -> Int64s:
        """Lengths of the pieces of documents that fill the stream positions `[start, stop)`.

        A document that began before `start` begins anew there, one that goes on after `stop` ends
        there, and long ones are cut into pieces of at most `max_document_length`.
        """
        self._check_range(start, stop)
        first = np.searchsorted(self.offsets, start, side="right")
        last = np.searchsorted(self.offsets, stop, side="left")
        edges = np.concatenate([[start], self.offsets[first:last], [stop]]).astype(np.int64)
        lengths = np.diff(edges)
        if max_document_length is None or lengths.max(initial=0) <= max_document_length:
            return lengths
        pieces = -(-lengths // max_document_length)
        cut = np.full(int(pieces.sum()), max_document_length, dtype=np.int64)
        cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * max_document_length
        return cut

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The stream positions `[start, stop)`.

        Returns:
            tokens int64, labels int64 (the next token of the same document) and loss mask float32
            (0 for the last token of a document, whose label is meaningless), each `[stop - start]`.
        """
        self._check_range(start, stop)
        tokens = np.empty(stop - start, dtype=np.int64)
        labels = np.zeros(stop - start, dtype=np.int64)
        loss_mask = np.ones(stop - start, dtype=np.float32)
        at = start
        entry = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while at < stop:
            begins, ends = int(self.offsets[entry]), int(self.offsets[entry + 1])
            until = min(stop, ends)
            # One token more where there is one: the target of the last.
            reach = min(until + 1, ends)
            found = self.corpora[int(self.corpus[entry])].read(
                int(self.document[entry]), at - begins, reach - begins
            )
            tokens[at - start : until - start] = found[: until - at]
            labels[at - start : at - start + len(found) - 1] = found[1:]
            if until == ends:
                loss_mask[until - 1 - start] = 0.0
            at, entry = until, entry + 1
        return tokens, labels, loss_mask

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start < stop <= int(self.offsets[-1]):
            raise ValueError(
                f"tokens [{start}, {stop}) were asked for, but the stream was opened for "
                f"{int(self.offsets[-1])}"
            )


def _shuffled_epochs(
    candidates: Int64s, lengths: Int64s, wanted: int, seed: tuple[int, int]
) -> Int64s:
    """Documents in training order, epoch after epoch, until they hold the tokens that are wanted."""
    per_epoch = int(lengths[candidates].sum())
    epochs: list[Any] = []
    while len(epochs) * per_epoch < wanted:
        generator = np.random.default_rng((*seed, len(epochs)))
        epochs.append(candidates[generator.permutation(len(candidates))])
    order = np.concatenate(epochs)
    reached = np.cumsum(lengths[order])
    return order[: int(np.searchsorted(reached, wanted)) + 1]
