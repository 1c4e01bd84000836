"""Documents that stay whole in packs, padding, passes over a stream, and a list of one's own."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.documents.document_list import ListedDocuments
from megatron_patches.batches.blends import SPLITS, Blend, check_blends
from megatron_patches.batches.custom_dataset import name_of
from megatron_patches.batches.dataset_factory import check_documents, open_source
from megatron_patches.batches.padding import fill_packs, padding_lengths
from megatron_patches.batches.resuming import check_packs, max_document_tokens, warn_of_cuts
from megatron_patches.batches.stream import TokenStream
from megatron_patches.flags.config import DistcaConfig, DocumentsConfig

LENGTHS = np.random.default_rng(0).integers(1, 300, 40)


class Numbered:
    """Documents of which no two tokens are alike; the first half of each counts for nothing."""

    lengths = LENGTHS

    def __len__(self) -> int:
        return len(LENGTHS)

    def tokens(self, index: int) -> np.ndarray:
        return 1 + LENGTHS[:index].sum() + np.arange(LENGTHS[index])

    def loss_weights(self, index: int) -> np.ndarray:
        return np.arange(LENGTHS[index]) >= LENGTHS[index] // 2


def documents(args: Namespace, split: str) -> Any:
    """As `--distca-documents` names it; there is no test."""
    return None if split == "test" else Numbered()


def open_stream(num_tokens: int | None, **given: Any) -> TokenStream:
    return TokenStream.open(
        Blend(("mine",), None, None),
        "train",
        seed=3,
        num_tokens=num_tokens,
        open_source=lambda name: ListedDocuments(name, Numbered()),
        **given,
    )


@settings(max_examples=60)
@given(st.integers(1, 400), st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_packs_hold_whole_documents_in_their_order(pack, shares) -> None:
    lengths = np.array([1 + int(share * (pack - 1)) for share in shares])
    order, filled = fill_packs(lengths, pack)
    assert order[order >= 0].tolist() == list(range(len(lengths)))
    assert filled[order >= 0].tolist() == lengths.tolist()
    ends = np.cumsum(filled)
    assert ends[-1] % pack == 0
    assert ((ends - 1) // pack == (ends - filled) // pack).all()
    # A document comes in the next pack only where it does not fit.
    after = np.flatnonzero((order[1:] < 0) & (order[:-1] >= 0))
    for each in after[after + 1 < order.argmax()]:
        begun = int(ends[each]) % pack or pack
        assert begun + lengths[order[each] + 1] > pack


def test_padding_fills_any_number_of_tokens() -> None:
    for tokens in (0, 1, 127, 128, 300):
        assert padding_lengths(tokens).sum() == tokens


def test_whole_documents_are_read_with_padding_that_has_no_loss() -> None:
    stream = open_stream(20_000, max_document_length=512, whole=True)
    seen: list[int] = []
    for start in range(0, 20_000 - 512, 512):
        tokens, labels, weights = stream.read(start, start + 512)
        assert not weights[tokens == 0].any()
        firsts = np.cumsum(stream.document_lengths(start, start + 512))
        assert firsts[-1] == 512
        ids = tokens[tokens > 0]
        seen += ids.tolist()
        assert (labels[weights > 0] == tokens[weights > 0] + 1).all()
    # All of each document: token by token, and from its first one on.
    ends = np.cumsum(LENGTHS)
    at = 0
    while at < len(seen):
        number = int(np.searchsorted(ends, seen[at] - 1, side="right"))
        length = int(LENGTHS[number])
        assert seen[at : at + length] == (1 + ends[number] - length + np.arange(length)).tolist()
        at += length
    assert not stream.repeats_within(4000)


def test_a_pass_has_each_document_once_and_then_padding() -> None:
    for options in ({}, {"whole": True, "max_document_length": 300}):
        stream = open_stream(None, **options).in_passes(1024)
        assert stream.tokens % 1024 == 0
        tokens, _, weights = stream.read(0, stream.tokens)
        assert sorted(tokens[tokens > 0].tolist()) == list(range(1, 1 + LENGTHS.sum()))
        # The first token of a document is no target, and of one of one token none is.
        assert weights.sum() == (LENGTHS - np.maximum(LENGTHS // 2, 1)).sum()
        again = stream.read(3 * stream.tokens + 1024, 3 * stream.tokens + 2048)
        for once, later in zip(stream.read(1024, 2048), again, strict=True):
            assert (once == later).all()
        lengths = stream.document_lengths(2 * stream.tokens, 2 * stream.tokens + 1024)
        assert lengths.tolist() == stream.document_lengths(0, 1024).tolist()


def test_a_document_that_does_not_fit_is_named() -> None:
    longest = int(LENGTHS.argmax())
    with pytest.raises(ValueError, match=f"document {longest} of mine has .* at most 200 stay"):
        open_stream(1000, max_document_length=200, whole=True)


def arguments(**given: Any) -> Namespace:
    common = {"seq_length": 128, "data_parallel_size": 2, "micro_batch_size": 1}
    common |= {"global_batch_size": 4, "rampup_batch_size": None, "eval_iters": 1}
    common |= {"vocab_size": 10_000, "decrease_batch_size_if_needed": False}
    common |= {"full_validation": False, "multiple_validation_sets": False, "data_path": None}
    common |= {"data_args_path": None, "per_split_data_args_path": None}
    common |= dict.fromkeys(f"{split}_data_path" for split in SPLITS)
    return Namespace(**common | given)


def whole(
    enabled: bool = True, chain: int = 1, max_length: int | None = None, function: Any = None
) -> DistcaConfig:
    own = DocumentsConfig(max_length, whole=True, function=function or name_of(documents))
    return DistcaConfig(enabled, own, chain=chain)


def test_documents_that_windows_cut_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A window has 256 tokens. Pools alone let documents cross it."""
    own = DocumentsConfig(300, function=name_of(documents))
    for config, warned in (
        (DistcaConfig(True, own), True),
        (DistcaConfig(True, own, chain=2), False),
        (DistcaConfig(True, own, pool_size=1), False),
        (DistcaConfig(True, replace(own, max_length=256)), False),
        (DistcaConfig(True, replace(own, max_length=None)), False),
    ):
        caplog.clear()
        warn_of_cuts(config, arguments())
        assert ("of up to 300 tokens are cut where windows of 256 tokens" in caplog.text) == warned


def test_packs_are_what_attends_together() -> None:
    for config, pack in ((whole(), 256), (whole(enabled=False), 128), (whole(chain=2), 512)):
        assert max_document_tokens(config, arguments()) == pack
        check_packs(config, arguments(), 3 * pack)


@pytest.mark.parametrize(
    ("config", "global_batch", "first"),
    [
        (whole(max_length=200), 4, 0),
        (whole(enabled=False, max_length=256), 4, 0),
        (whole(), 4, 128),
        # Of three micro-batches the last one has no other to share documents with.
        (whole(chain=2), 6, 0),
    ],
)
def test_windows_that_would_cut_packs_are_refused(
    config: DistcaConfig, global_batch: int, first: int
) -> None:
    with pytest.raises(ValueError, match="would cut: give --distca-max-document-length"):
        check_packs(config, arguments(global_batch_size=global_batch), first)


def test_one_s_own_documents_stand_for_all_splits() -> None:
    args, config = arguments(data_parallel_size=4), whole(max_length=512)
    assert check_blends(config.documents, args, SPLITS).keys() == {"train", "valid"}
    check_documents(config, args, SPLITS)
    source = open_source(config, args, name_of(documents), "train")
    assert source.lengths.tolist() == LENGTHS.tolist()
    with pytest.raises(ValueError, match=r"documents:documents has .* tokens, but at most 256"):
        check_documents(whole(), arguments(), SPLITS)
    with pytest.raises(ValueError, match=r"holds the token .* vocabulary has 99 tokens"):
        check_documents(config, arguments(data_parallel_size=4, vocab_size=99), SPLITS)
    with pytest.raises(ValueError, match="would cut: give --distca-max-document-length"):
        check_documents(config, arguments(), SPLITS)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("documents", "give MODULE:FUNCTION"),
        ("no_such_module:f", "cannot be imported .*no_such_module.*: put its folder in PYTHONPATH"),
        (f"{__name__}:no_such", "cannot be imported"),
        (f"{__name__}:LENGTHS", "is no function of"),
    ],
)
def test_a_name_of_no_function_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_blends(DocumentsConfig(function=name), arguments(), ["train"])


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="give a function that a module defines by name"):
        name_of(lambda args, split: None)
