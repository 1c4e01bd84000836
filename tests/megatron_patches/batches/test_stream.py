"""The token stream against a slow reading of the same documents, and the errors of bad files."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_patches.batches.blends import Blend, Split
from megatron_patches.batches.stream import (
    _SAMPLED_TOKENS,
    Corpus,
    TokenStream,
    check_sources,
    split_documents,
)

HEADER_BYTES = 34


def write_corpus(
    prefix: str, documents: Sequence[Sequence[Sequence[int]]], dtype: type = np.uint16
) -> str:
    """An indexed dataset of documents, each of which is a list of sequences of tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        tokens = [token for sequence in sequences for token in sequence]
        builder.add_document(np.array(tokens, dtype=np.int64), [len(s) for s in sequences])
    builder.finalize(f"{prefix}.idx")
    return prefix


def numbered(lengths: Sequence[int], first: int = 1) -> list[list[list[int]]]:
    """One document a length, no two tokens of all of them alike."""
    ends = np.cumsum([first, *lengths])
    return [[list(range(a, b))] for a, b in pairwise(ends.tolist())]


def open_stream(
    prefixes: Sequence[str],
    num_tokens: int,
    weights: Sequence[float] | None = None,
    split: str | None = "1",
    which: Split = "train",
    **kwargs: Any,
) -> TokenStream:
    blend = Blend(tuple(prefixes), None if weights is None else tuple(weights), split)
    return TokenStream.open(blend, which, num_tokens=num_tokens, **{"seed": 7} | kwargs)


def read_slowly(
    stream: TokenStream, corpora: Sequence[Sequence[Sequence[Sequence[int]]]]
) -> tuple[list[int], list[int | None], list[int]]:
    """Tokens, labels (None: no target) and document numbers of the whole stream."""
    tokens: list[int] = []
    labels: list[int | None] = []
    documents: list[int] = []
    for entry, (corpus, document) in enumerate(zip(stream.corpus, stream.document, strict=True)):
        whole = [token for sequence in corpora[corpus][document] for token in sequence]
        tokens += whole
        labels += [*whole[1:], None]
        documents += [entry] * len(whole)
    return tokens, labels, documents


sequences = st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=4)
some_documents = st.lists(sequences, min_size=1, max_size=6).filter(
    lambda documents: any(sequence for document in documents for sequence in document)
)


@settings(max_examples=60)
@given(
    st.lists(some_documents, min_size=1, max_size=3),
    st.integers(1, 80),
    st.lists(st.integers(1, 79), max_size=6),
    st.sampled_from([np.uint16, np.int32]),
)
def test_reads_do_not_depend_on_where_windows_cut(corpora, num_tokens, cuts, dtype):
    with tempfile.TemporaryDirectory() as folder:
        prefixes = [
            write_corpus(f"{folder}/{number}", documents, dtype)
            for number, documents in enumerate(corpora)
        ]
        stream = open_stream(prefixes, num_tokens)
        tokens, labels, _ = read_slowly(stream, corpora)
        assert len(tokens) >= num_tokens
        edges = sorted({0, num_tokens, *(cut for cut in cuts if cut < num_tokens)})
        for start, stop in pairwise(edges):
            got, targets, loss_mask = stream.read(start, stop)
            assert (got.dtype, targets.dtype, loss_mask.dtype) == (np.int64, np.int64, np.float32)
            assert got.tolist() == tokens[start:stop]
            expected = labels[start:stop]
            assert loss_mask.tolist() == [float(label is not None) for label in expected]
            assert [
                int(target) if label is not None else None
                for target, label in zip(targets, expected, strict=True)
            ] == expected


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(0, 40),
    st.integers(1, 40),
)
def test_document_lengths_are_the_runs_of_one_document(lengths, start, count):
    documents = numbered(lengths)
    with tempfile.TemporaryDirectory() as folder:
        stream = open_stream([write_corpus(f"{folder}/c", documents)], start + count)
        _, _, numbers = read_slowly(stream, [documents])
        pieces: list[int] = []
        for position in range(start, start + count):
            goes_on = position > start and numbers[position] == numbers[position - 1]
            if goes_on:
                pieces[-1] += 1
            else:
                pieces.append(1)
        found = stream.document_lengths(start, start + count)
        assert found.dtype == np.int64
        assert found.tolist() == pieces


@pytest.mark.parametrize("start", [-17, 0, 40])
def test_positions_may_count_from_another_start(tmp_path, start):
    prefixes = [
        write_corpus(f"{tmp_path}/{name}", numbered([5, 30, 11])) for name in ("first", "second")
    ]
    whole = open_stream(prefixes, 100)
    stream = open_stream(prefixes, 100 - start, start=start)
    for found, expected in zip(
        stream.read(17 - start, 100 - start), whole.read(17, 100), strict=True
    ):
        assert found.tolist() == expected.tolist()
    lengths = stream.document_lengths(17 - start, 100 - start)
    assert lengths.tolist() == whole.document_lengths(17, 100).tolist()
    for outside in ((-1 - start, 1), (100 - start, 400)):
        with pytest.raises(ValueError, match="were asked for"):
            stream.read(*outside)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 12))
def test_long_documents_are_cut_into_pieces_that_are_shuffled(lengths, longest):
    """An epoch holds every token once, and no target is lost where a document is cut."""
    documents = numbered(lengths)
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_corpus(f"{folder}/c", documents)
        stream = open_stream([prefix], sum(lengths), max_document_length=longest)
        pieces = np.diff(stream.offsets)
        assert pieces.max() <= longest
        assert len(pieces) == sum(-(-length // longest) for length in lengths)
        tokens, labels, loss_mask = stream.read(0, sum(lengths))
    assert sorted(tokens.tolist()) == list(range(1, sum(lengths) + 1))
    last_tokens = set(np.cumsum(lengths).tolist())
    for token, label, counts in zip(tokens, labels, loss_mask, strict=True):
        assert counts == (token not in last_tokens)
        if counts:
            assert label == token + 1


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.floats(0.05, 20), min_size=3, max_size=3),
    st.integers(1, 60),
    st.integers(1, 200),
)
def test_a_longer_stream_begins_the_same_and_keeps_the_weights(corpora, weights, short, more):
    weights = weights[: len(corpora)]
    with tempfile.TemporaryDirectory() as folder:
        prefixes = [
            write_corpus(f"{folder}/{number}", numbered(lengths))
            for number, lengths in enumerate(corpora)
        ]
        small = open_stream(prefixes, short, weights=weights)
        large = open_stream(prefixes, short + more, weights=weights)
        count = len(small.document)
        assert small.offsets[-1] >= short
        assert large.document[:count].tolist() == small.document.tolist()
        assert large.corpus[:count].tolist() == small.corpus.tolist()
        assert large.offsets[: count + 1].tolist() == small.offsets.tolist()
        # After each document no corpus is further from its share than a document of each.
        slack = sum(max(lengths) for lengths in corpora)
        sizes = np.diff(large.offsets)
        for number, weight in enumerate(weights):
            own = np.cumsum(np.where(large.corpus == number, sizes, 0))
            assert np.abs(own - large.offsets[1:] * weight / sum(weights)).max() <= slack + 1e-6


def test_each_epoch_is_another_permutation_set_by_the_seed(tmp_path):
    prefix = write_corpus(str(tmp_path / "c"), numbered([3] * 20))
    stream = open_stream([prefix], 3 * 20 * 3)
    epochs = stream.document.reshape(3, 20)
    assert (np.sort(epochs, axis=1) == np.arange(20)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert open_stream([prefix], 180).document.tolist() == stream.document.tolist()
    assert open_stream([prefix], 180, seed=8).document.tolist() != stream.document.tolist()


def test_without_weights_each_dataset_counts_by_its_size(tmp_path):
    prefixes = [
        write_corpus(str(tmp_path / "a"), numbered([5] * 30)),
        write_corpus(str(tmp_path / "b"), numbered([5] * 10)),
    ]
    stream = open_stream(prefixes, 200)
    assert np.bincount(stream.corpus).tolist() == [30, 10]
    assert len(set(zip(stream.corpus.tolist(), stream.document.tolist(), strict=True))) == 40


def test_splits_share_no_document(tmp_path):
    prefix = write_corpus(str(tmp_path / "c"), numbered([2] * 100))
    parts = [
        set(open_stream([prefix], 400, split="90,8,2", which=which).document.tolist())
        for which in ("train", "valid", "test")
    ]
    assert [len(part) for part in parts] == [90, 8, 2]
    assert set.union(*parts) == set(range(100))
    assert parts[1] == set(range(90, 98))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 5000))
def test_splits_divide_all_documents_in_order(shares, documents):
    split = ",".join(map(str, shares))
    at = 0
    for which, share in zip(("train", "valid", "test"), [*shares, 0, 0], strict=False):
        first, last = split_documents(split, which, documents)
        if last > first:
            assert first == at
            at = last
        assert abs((last - first) - documents * share / sum(shares)) <= 1
    assert at == documents


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,2,3,4", "-1,2,3", "nan,1,1", "inf,1"])
def test_unreadable_splits_are_refused(split):
    with pytest.raises(ValueError, match="--split"):
        split_documents(split, "train", 10)


def test_an_empty_split_is_named(tmp_path):
    prefix = write_corpus(str(tmp_path / "c"), numbered([2] * 10))
    with pytest.raises(ValueError, match=r"the valid split of .*c is empty"):
        open_stream([prefix], 5, split="100,0,0", which="valid")


def test_positions_beyond_the_stream_are_refused(tmp_path):
    stream = open_stream([write_corpus(str(tmp_path / "c"), numbered([4] * 3))], 10)
    with pytest.raises(ValueError, match="opened for"):
        stream.read(0, int(stream.offsets[-1]) + 1)


@pytest.fixture
def prefix(tmp_path) -> str:
    return write_corpus(str(tmp_path / "corpus"), numbered([5, 1, 7]))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix, suffix):
    Path(prefix + suffix).unlink()
    with pytest.raises(ValueError, match=rf"corpus\{suffix} does not exist"):
        Corpus(prefix)


@pytest.mark.parametrize("keep", [0, 8, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 30, -1])
def test_a_cut_off_index_is_refused(prefix, keep):
    index = Path(prefix + ".idx")
    index.write_bytes(index.read_bytes()[:keep])
    with pytest.raises(ValueError, match="cut off"):
        Corpus(prefix)


@pytest.mark.parametrize("keep", [0, 2 * 12, -1])
def test_a_cut_off_token_file_is_refused(prefix, keep):
    tokens = Path(prefix + ".bin")
    tokens.write_bytes(tokens.read_bytes()[:keep])
    with pytest.raises(ValueError, match="its index points at 26"):
        Corpus(prefix)


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"X"),
        (9, struct.pack("<Q", 2)),  # version
        (17, b"\x63"),  # dtype
        (18, struct.pack("<Q", 1 << 60)),  # sequences
        (HEADER_BYTES, struct.pack("<i", -1)),  # a length
        (HEADER_BYTES + 12, struct.pack("<q", -2)),  # a pointer
        (HEADER_BYTES + 12, struct.pack("<q", 1 << 40)),
        (HEADER_BYTES + 36, struct.pack("<q", 1)),  # the first document
        (HEADER_BYTES + 36 + 8, struct.pack("<q", 3)),
        (HEADER_BYTES + 36 + 3 * 8, struct.pack("<q", 2)),  # the end of the last
    ],
)
def test_a_corrupt_index_is_refused(prefix, offset, value):
    index = Path(prefix + ".idx")
    content = bytearray(index.read_bytes())
    content[offset : offset + len(value)] = value
    index.write_bytes(content)
    with pytest.raises(ValueError, match="make"):
        Corpus(prefix)


@pytest.mark.parametrize("documents", [[], [[[]], [[]]]])
def test_a_dataset_without_tokens_is_refused(tmp_path, documents):
    with pytest.raises(ValueError, match="holds no tokens"):
        Corpus(write_corpus(str(tmp_path / "empty"), documents))


def test_tokens_of_another_vocabulary_are_refused(prefix):
    assert Corpus(prefix, vocab_size=14).lengths.tolist() == [5, 1, 7]
    with pytest.raises(ValueError, match=r"holds the token 13 .*vocabulary has 13 tokens"):
        Corpus(prefix, vocab_size=13)


def test_the_end_token_of_a_long_document_is_looked_at(tmp_path):
    prefix = write_corpus(str(tmp_path / "long"), [[[0] * 200_000 + [9]]])
    with pytest.raises(ValueError, match="holds the token 9"):
        Corpus(prefix, vocab_size=9)


@pytest.mark.parametrize("length", [_SAMPLED_TOKENS, _SAMPLED_TOKENS + 10])
def test_no_more_of_a_long_document_is_looked_at_than_its_last_tokens(tmp_path, length):
    tokens = np.zeros(length, dtype=np.int64)
    first = length - _SAMPLED_TOKENS
    tokens[:first] = 9
    Corpus(write_corpus(str(tmp_path / "before"), [[tokens.tolist()]]), vocab_size=9)
    tokens[first] = 9
    prefix = write_corpus(str(tmp_path / "first"), [[tokens.tolist()]])
    with pytest.raises(ValueError, match="holds the token 9"):
        Corpus(prefix, vocab_size=9)


def test_every_read_is_checked(tmp_path) -> None:
    """Not only the documents that are tried when a dataset is opened."""
    # The token that is wrong is in no document that is tried, and far from its document's end.
    documents = [[[-1 if document == 501 else 7] * 30] for document in range(1000)]
    prefix = write_corpus(str(tmp_path / "many"), documents, np.int32)
    corpus = Corpus(prefix, vocab_size=9)
    assert corpus.read(500, 0, 30).tolist() == [7] * 30
    with pytest.raises(ValueError, match=r"many holds the token -1 \(document 501\).* 9 tokens"):
        corpus.read(501, 3, 9)
    assert Corpus(prefix).read(501, 3, 4).tolist() == [-1]


def test_tokens_behind_the_index_are_refused(prefix) -> None:
    with Path(prefix + ".bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"has 30 bytes, but its index ends at 26: they are of"):
        Corpus(prefix)


class Silent(Corpus):
    """Documents of which no token counts in the loss, or one does."""

    counts = 0.0

    def loss_weights(self, document: int, start: int, end: int) -> Any:
        weights = np.zeros(end - start)
        if document == 2:
            weights[-1] = self.counts
        return weights


class Heard(Silent):
    counts = 0.5


def test_documents_without_a_token_that_counts_are_refused(prefix) -> None:
    blends: dict[Split, Blend] = {"train": Blend((prefix,), None, "100,0,0")}
    check_sources(blends, lambda name, which: Heard(name))
    with pytest.raises(ValueError, match=r"train split of .* has no token that counts in the loss"):
        check_sources(blends, lambda name, which: Silent(name))


def test_a_run_that_reads_its_text_too_often_is_refused(prefix) -> None:
    blend = Blend((prefix,), None, None)
    with pytest.raises(ValueError, match=r"reads 9e\+15 tokens, each document .* lower --train-it"):
        TokenStream.open(blend, "train", seed=0, num_tokens=9 * 10**15)


def test_the_vocabulary_that_prepare_noted_is_held_to(prefix):
    Path(prefix + ".json").write_text(json.dumps({"vocab_size": 100}))
    Corpus(prefix, vocab_size=100)
    for other in (50, 200):
        with pytest.raises(ValueError, match=f"vocabulary of 100 tokens.*has {other}"):
            Corpus(prefix, vocab_size=other)


@pytest.mark.parametrize("content", ['{"text": "a"}\n{"text": "b"}\n', "[]", "\x00", "{}"])
def test_a_json_file_of_another_origin_is_ignored(prefix, content):
    Path(prefix + ".json").write_text(content)
    Corpus(prefix, vocab_size=14)
