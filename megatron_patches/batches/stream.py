"""The token stream of a split: its documents in training order.

Documents longer than a bound are cut into pieces, and the pieces are shuffled: else a very long
document would fill many batches in a row. The order depends on the data, the bound, the weights and
the seed alone: not on the ranks that read the stream, or on how much of it they read. A token's
label is the next token of its document wherever pieces, windows and ranks cut, and the last token
of a document has none.

Where documents must stay whole, they lie in *packs* of as many tokens as the bound, and padding
fills the end of each: no window of some packs then cuts a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import normalize

from distca.documents.document_list import TokenSource
from distca.documents.index import check_files_exist, read_index
from distca.plan.span import Int64s
from distca.schedule import DocumentTrees
from distca.wording import counted
from megatron_patches.batches.blends import SPLITS, Blend, Split
from megatron_patches.batches.padding import Padding, fill_packs, padding_lengths
from megatron_patches.batches.pieces import pieces_of, shuffled_epochs

_SAMPLED_DOCUMENTS = 64
"""Documents that are read when a dataset is opened, so that another vocabulary is found early."""
_SAMPLED_TOKENS = 1 << 16
"""Tokens of such a document that are read: its last ones, with its end token."""
_SIDECAR_BYTES = 1 << 16
"""Longest `PREFIX.json` of ours; longer ones may be JSON lines that the dataset was made from."""


def split_documents(split: str, which: Split, documents: int) -> tuple[int, int]:
    """Returns the documents `[first, last)` of a split of Megatron's `--split 969,30,1`.

    Raises:
        ValueError: the split cannot be read, or sums to nothing.
    """
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not 0 < sum(shares) < np.inf or min(shares) < 0:
        raise ValueError(f"--split {split!r}: give three shares, such as 969,30,1")
    parts = convert_split_vector_to_split_matrix(normalize([*shares, 0.0, 0.0][:3]))
    first, last = parts[SPLITS.index(which)] or (0.0, 0.0)
    return round(first * documents), round(last * documents)


class Corpus(TokenSource):
    """One indexed dataset (`.bin` and `.idx`) as documents of tokens.

    Args:
        prefix: path without `.bin` or `.idx`.
        vocab_size: bound that token ids must be below; None: not checked.

    Raises:
        ValueError: a file is missing, truncated or corrupt, or of another vocabulary.
    """

    def __init__(self, prefix: str, vocab_size: int | None = None) -> None:
        self.prefix = prefix
        _check_files(prefix)
        self._dataset = IndexedDataset(prefix, multimodal=False, mmap=True)
        edges = np.asarray(self._dataset.document_indices, dtype=np.int64)
        # Number of tokens before each sequence; a document is its sequences one after the other.
        self._before = np.zeros(len(self._dataset.sequence_lengths) + 1, dtype=np.int64)
        np.cumsum(self._dataset.sequence_lengths, out=self._before[1:])
        self._starts = self._before[edges[:-1]]
        self._lengths: Int64s = self._before[edges[1:]] - self._starts
        self._vocab_size = vocab_size
        if vocab_size is not None:
            self._check_vocabulary(vocab_size)

    @property
    def lengths(self) -> Int64s:
        return self._lengths

    def loss_weights(self, document: int, start: int, end: int) -> None:
        """See `TokenSource.loss_weights`: all tokens have the same weight."""

    def place(self, document: int) -> str:
        return f"document {document} of {self.prefix}"

    def read(self, document: int, start: int, end: int) -> Int64s:
        """Reads the tokens `[start, end)` of a document, int64 `[end - start]`.

        Raises:
            ValueError: one of them is not in the vocabulary.
        """
        origin = int(self._starts[document])
        position, until = origin + start, origin + end
        tokens = np.empty(end - start, dtype=np.int64)
        sequence = int(np.searchsorted(self._before, position, side="right")) - 1
        filled = 0
        while position < until:
            begins, ends = int(self._before[sequence]), int(self._before[sequence + 1])
            count = min(until, ends) - position
            if count > 0:
                found = self._dataset.get(sequence, position - begins, count)
                tokens[filled : filled + count] = found
            position, filled, sequence = position + count, filled + count, sequence + 1
        if self._vocab_size is not None and len(tokens):
            # Megatron-LM's embedding takes any token with tensor parallelism, as zeros.
            for token in (int(tokens.min()), int(tokens.max())):
                if not 0 <= token < self._vocab_size:
                    raise ValueError(
                        f"{self.prefix} holds the token {token} (document {document}), but the "
                        f"run's vocabulary has {self._vocab_size} tokens: give the tokenizer that "
                        "it was made with"
                    )
        return tokens

    def _check_vocabulary(self, vocab_size: int) -> None:
        made_for = _sidecar_vocab_size(Path(self.prefix + ".json"))
        if made_for is not None and made_for != vocab_size:
            raise ValueError(
                f"{self.prefix} was made with a vocabulary of {made_for} tokens, but the run's "
                f"has {vocab_size}: give the tokenizer that it was made with"
            )
        filled = np.flatnonzero(self.lengths)
        sample = filled[np.linspace(0, len(filled) - 1, _SAMPLED_DOCUMENTS).astype(np.int64)]
        for document in np.unique(sample).tolist():
            length = int(self.lengths[document])
            self.read(document, max(0, length - _SAMPLED_TOKENS), length)


def check_sources(
    blends: Mapping[Split, Blend],
    open_source: Callable[[str, Split], TokenSource],
    pack: int | None = None,
) -> None:
    """Tries the datasets of a run without keeping them.

    Args:
        blends: datasets of the splits that the run reads.
        open_source: function that opens a dataset of a blend for a split.
        pack: most tokens of a document that must stay whole; None: documents may be cut.

    Raises:
        ValueError: see `Corpus`; or a split has no documents, or one that is too long.
    """
    for which, blend in blends.items():
        for prefix in blend.prefixes:
            source = open_source(prefix, which)
            candidates = _split_candidates(source, prefix, blend.split, which)
            if pack is not None:
                _check_whole(source, candidates, pack)
            _check_loss(source, candidates, f"the {which} split of {prefix}")


def _sidecar_vocab_size(sidecar: Path) -> int | None:
    """Reads the vocabulary size that `distca prepare` noted beside its files, if it made them."""
    if not sidecar.is_file() or sidecar.stat().st_size > _SIDECAR_BYTES:
        return None
    try:
        made_for = json.loads(sidecar.read_text(encoding="utf-8"))["vocab_size"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return made_for if isinstance(made_for, int) else None


def _check_files(prefix: str) -> None:
    check_files_exist(prefix)
    index = read_index(Path(prefix + ".idx"))
    if not index.lengths.any():
        raise ValueError(f"{prefix} holds no tokens: make it again, from text")
    nbytes = index.lengths * index.token_bytes
    have = Path(prefix + ".bin").stat().st_size
    # No sum is compared, since it could overflow.
    beyond = np.flatnonzero(index.pointers > have - nbytes)
    if len(beyond):
        last = beyond[index.pointers[beyond].argmax()]
        raise ValueError(
            f"{prefix}.bin has {have} bytes, but its index points at "
            f"{int(index.pointers[last]) + int(nbytes[last])}: it is cut off or of another "
            "dataset; make both again"
        )
    # Each is within the file now, so none overflows.
    indexed = int((index.pointers + nbytes).max())
    if indexed < have:
        raise ValueError(
            f"{prefix}.bin has {have} bytes, but its index ends at {indexed}: they are of two "
            "datasets, or one was still being written; make both again"
        )


@dataclass(frozen=True)
class TokenStream:
    """The documents of a split, or pieces of them, in training order, one after the other.

    Attributes:
        corpora: sources of the documents.
        corpus: number of each piece's corpus, int64 `[pieces]`.
        document: number of each piece's document in its corpus, int64 `[pieces]`.
        first: position in its document at which each piece starts, int64 `[pieces]`.
        offsets: position in the stream at which each piece starts, int64 `[pieces + 1]`; the
            first is 0, unless positions are counted from another start.
        passes: whether positions count on when all tokens were read, from the first one on.
    """

    corpora: tuple[TokenSource, ...]
    corpus: Int64s
    document: Int64s
    first: Int64s
    offsets: Int64s
    passes: bool = False

    @staticmethod
    def open(
        blend: Blend,
        which: Split,
        *,
        seed: int,
        num_tokens: int | None,
        start: int = 0,
        max_document_length: int | None = None,
        whole: bool = False,
        open_source: Callable[[str], TokenSource] = Corpus,
    ) -> TokenStream:
        """Opens the datasets and orders their documents.

        Each corpus is shuffled anew for each of its epochs. Several corpora are interleaved so
        that at any point of the stream their tokens stand in the proportion of the weights.

        Args:
            blend: datasets; without weights each counts by the tokens of its split.
            which: split to open.
            seed: seed of the shuffling.
            num_tokens: fewest tokens of the stream from its start on. A longer one begins the same.
                None: each document once, from the first.
            start: number of tokens of the stream before its position 0; may be negative.
            max_document_length: most tokens of a piece into which documents are cut.
            whole: whether documents stay whole, in packs of `max_document_length` tokens.
            open_source: function that opens a dataset of the blend.

        Raises:
            ValueError: see `Corpus`; or the split has no documents, or one that is too long.
        """
        corpora = tuple(open_source(prefix) for prefix in blend.prefixes)
        candidates = [
            _split_candidates(corpus, prefix, blend.split, which)
            for corpus, prefix in zip(corpora, blend.prefixes, strict=True)
        ]
        if whole:
            assert max_document_length is not None
            for corpus, documents in zip(corpora, candidates, strict=True):
                _check_whole(corpus, documents, max_document_length)
        weights = blend.weights or [
            float(corpus.lengths[documents].sum())
            for corpus, documents in zip(corpora, candidates, strict=True)
        ]
        once, stop = num_tokens is None, start + (num_tokens or 0)
        tables = []
        for number, (corpus, weight) in enumerate(zip(corpora, weights, strict=True)):
            wanted = int(np.ceil(stop * weight / sum(weights))) + 1
            if once:
                wanted = int(corpus.lengths[candidates[number]].sum())
            document, first, lengths = pieces_of(
                candidates[number], corpus.lengths, max_document_length
            )
            order = shuffled_epochs(lengths, wanted, (seed, number))
            document, first, lengths = document[order], first[order], lengths[order]
            progress = (np.cumsum(lengths) - lengths) / weight
            tables.append((np.full_like(order, number), document, first, lengths, progress))
        corpus_column, document, first, lengths, progress = (
            np.concatenate(column) for column in zip(*tables, strict=True)
        )
        if len(corpora) > 1:
            order = np.lexsort((corpus_column, progress))
            corpus_column, document = corpus_column[order], document[order]
            first, lengths = first[order], lengths[order]
        if whole:
            assert max_document_length is not None
            order, lengths = fill_packs(lengths, max_document_length)
            is_padding = order < 0
            corpus_column = np.where(is_padding, len(corpora), corpus_column[order])
            document = np.where(is_padding, Padding.document(lengths), document[order])
            first = np.where(is_padding, 0, first[order])
            corpora = (*corpora, Padding())
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # Cut off here, since further on one corpus has run out and others have not.
        count = len(lengths) if once else int(np.searchsorted(offsets, stop))
        return TokenStream(
            corpora,
            corpus_column[:count],
            document[:count],
            first[:count],
            offsets[: count + 1] - start,
        )

    def in_passes(self, multiple: int) -> TokenStream:
        """Returns an endless stream of the same tokens, padded to a multiple.

        Args:
            multiple: number of tokens that divides the length of a pass.
        """
        missing = padding_lengths(-int(self.offsets[-1] - self.offsets[0]) % multiple)
        padding = np.full_like(missing, len(self.corpora))
        return replace(
            self,
            corpora=(*self.corpora, Padding()),
            corpus=np.concatenate([self.corpus, padding]),
            document=np.concatenate([self.document, Padding.document(missing)]),
            first=np.concatenate([self.first, np.zeros_like(missing)]),
            offsets=np.concatenate([self.offsets, self.offsets[-1] + np.cumsum(missing)]),
            passes=True,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens of the stream, or of a pass."""
        return int(self.offsets[-1] - self.offsets[0])

    def repeats_within(self, tokens: int) -> bool:
        """Returns whether a piece of a document comes twice in the first tokens of the stream."""
        count = int(np.searchsorted(self.offsets[:-1], self.offsets[0] + tokens))
        pieces = np.column_stack([self.corpus, self.document, self.first])[:count]
        padding = [n for n, corpus in enumerate(self.corpora) if isinstance(corpus, Padding)]
        pieces = pieces[~np.isin(pieces[:, 0], padding)]
        return len(np.unique(pieces, axis=0)) < len(pieces)

    def document_lengths(self, start: int, stop: int) -> Int64s:
        """Returns the lengths of the pieces of documents at the stream positions `[start, stop)`.

        A piece that began before `start` begins anew there, and one that goes on after `stop` ends
        there.
        """
        start, stop = self._within(start, stop)
        first = np.searchsorted(self.offsets, start, side="right")
        last = np.searchsorted(self.offsets, stop, side="left")
        edges = np.concatenate([[start], self.offsets[first:last], [stop]]).astype(np.int64)
        return np.diff(edges)

    @property
    def shares_tokens(self) -> bool:
        """Whether documents are trees, of conversations that share tokens."""
        return any(corpus.shares_tokens for corpus in self.corpora)

    def trees(self, start: int, stop: int) -> DocumentTrees:
        """Returns the nodes of the documents that lie whole at the positions `[start, stop)`."""
        start, stop = self._within(start, stop)
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets, stop, side="left"))
        columns = self.corpus[first:last].tolist(), self.document[first:last].tolist()
        return DocumentTrees.of(
            [self.corpora[corpus].tree(document) for corpus, document in zip(*columns, strict=True)]
        )

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads the stream positions `[start, stop)`.

        Returns:
            Tokens int64, labels int64 (the next token of the same document) and loss mask float32
            (the label's weight in the loss, 0 for the last token of a document, whose label is
            meaningless), each `[stop - start]`.
        """
        start, stop = self._within(start, stop)
        tokens = np.empty(stop - start, dtype=np.int64)
        labels = np.zeros(stop - start, dtype=np.int64)
        for corpus, document, origin, position, until in self._parts(start, stop):
            # One token more where there is one, as the last one's label.
            last = min(until + 1 - origin, int(corpus.lengths[document]))
            found, row = corpus.read(document, position - origin, last), position - start
            tokens[row : until - start] = found[: until - position]
            labels[row : row + len(found) - 1] = found[1:]
        return tokens, labels, self.loss_mask(start, stop)

    def loss_mask(self, start: int, stop: int) -> np.ndarray:
        """Returns the loss mask of the stream positions `[start, stop)`, as `read` does."""
        start, stop = self._within(start, stop)
        loss_mask = np.ones(stop - start, dtype=np.float32)
        for corpus, document, origin, position, until in self._parts(start, stop):
            length, row = int(corpus.lengths[document]), position - start
            first, last = position + 1 - origin, min(until + 1 - origin, length)
            weights = corpus.loss_weights(document, first, last)
            if weights is not None:
                loss_mask[row : row + len(weights)] = weights
            if until - origin == length:
                loss_mask[until - 1 - start] = 0.0
        return loss_mask

    def _parts(self, start: int, stop: int) -> Iterator[tuple[TokenSource, int, int, int, int]]:
        """Yields the parts of documents at the positions `[start, stop)` of the first pass.

        Each is a corpus, the number of a document, the position at which it would start in the
        stream if all of it were here, and the part's first position and end.
        """
        position = start
        entry = int(np.searchsorted(self.offsets, start, side="right")) - 1
        while position < stop:
            corpus, document = self.corpora[int(self.corpus[entry])], int(self.document[entry])
            origin = int(self.offsets[entry]) - int(self.first[entry])
            until = min(stop, int(self.offsets[entry + 1]))
            yield corpus, document, origin, position, until
            position, entry = until, entry + 1

    def piece_ends(self, positions: Int64s) -> Int64s:
        """Returns the stream positions at which the pieces of documents end that positions are in,
        int64 `[positions]`."""
        passed = np.zeros_like(positions)
        if self.passes:
            passed = (positions - self.offsets[0]) // self.tokens * self.tokens
        entry = np.searchsorted(self.offsets, positions - passed, side="right")
        ends: Int64s = self.offsets[entry] + passed
        return ends

    def targets(self, positions: Int64s) -> int:
        """Counts the targets of tokens by their positions, int64 `[tokens]`: those that
        conversations share count once for each."""
        if self.passes:
            positions = self.offsets[0] + (positions - self.offsets[0]) % self.tokens
        entry = np.searchsorted(self.offsets, positions, side="right") - 1
        found = 0
        for number in np.unique(entry).tolist():
            corpus, document = self.corpora[int(self.corpus[number])], int(self.document[number])
            origin = int(self.offsets[number]) - int(self.first[number])
            length = int(corpus.lengths[document])
            # The token behind each; none behind the last.
            behind = positions[entry == number] - origin + 1
            counts = corpus.target_counts(document, 0, length)
            found += int(counts[behind[behind < length]].sum())
        return found

    def _within(self, start: int, stop: int) -> tuple[int, int]:
        """Returns positions in the first pass, and checks that they are there."""
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if self.passes:
            passed = (start - first) // self.tokens * self.tokens
            start, stop = start - passed, stop - passed
        if not first <= start < stop <= last:
            raise ValueError(
                f"tokens [{start}, {stop}) were asked for, but the stream was opened for "
                f"[{first}, {last})"
            )
        return start, stop


def _check_whole(source: TokenSource, documents: Int64s, pack: int) -> None:
    """Refuses documents that do not fit a pack."""
    longest = int(documents[source.lengths[documents].argmax()])
    if source.lengths[longest] > pack:
        raise ValueError(
            f"{source.place(longest)} has {source.lengths[longest]} tokens, but at most {pack} "
            "stay whole: raise --seq-length (or --distca-max-document-length), or leave it out"
        )


def _check_loss(source: TokenSource, documents: Int64s, where: str) -> None:
    """Refuses documents without a token that counts in the loss, which would stay 0."""
    for document in documents.tolist():
        length = int(source.lengths[document])
        if length < 2:
            # Its only token is predicted by none.
            continue
        weights = source.loss_weights(document, 1, length)
        if weights is None or np.any(weights):
            return
    raise ValueError(
        f"{where} has no token that counts in the loss: give it answers, or documents of more "
        "than one token"
    )


def _split_candidates(corpus: TokenSource, prefix: str, split: str | None, which: Split) -> Int64s:
    """Returns the documents of a split that have tokens; without `--split` all of them."""
    if split is None:
        return np.flatnonzero(corpus.lengths)
    first, last = split_documents(split, which, len(corpus.lengths))
    candidates: Int64s = first + np.flatnonzero(corpus.lengths[first:last])
    if len(candidates) == 0:
        raise ValueError(
            f"the {which} split of {prefix} is empty: --split {split} leaves it none of "
            f"{counted(len(corpus.lengths), 'document')}; give it a larger share"
        )
    return candidates
