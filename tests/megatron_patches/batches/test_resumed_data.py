"""The data of a run that is resumed at other sequence lengths and numbers of ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_patches.batches.resuming import go_on_from
from megatron_patches.flags.config import DistcaConfig
from support.models import parse, start_processes

DOCUMENTS = np.random.default_rng(0).integers(1, 2000, 40)
SAMPLES = 8


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A dataset in which no two tokens are alike, of documents longer than most windows."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/numbered.bin", dtype=np.int32)
    tokens = np.arange(DOCUMENTS.sum())
    for document in np.split(tokens, np.cumsum(DOCUMENTS)[:-1]):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{tmp_path}/numbered.idx")
    return f"{tmp_path}/numbered"


def read_samples(
    flags: Sequence[str], saved: dict[str, Any] | None
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """This rank's tokens of the next samples, and what a checkpoint then notes. Collective."""
    from megatron_patches.loop.data import build_data

    args = parse([*flags, "--vocab-size", str(DOCUMENTS.sum())])
    start_processes(args)
    config = DistcaConfig.from_args(args)
    if saved is not None:
        config = go_on_from(saved, config, args)
        args.consumed_train_samples = saved["consumed_train_samples"]
        args.consumed_valid_samples = saved["consumed_valid_samples"]
    ends = args.consumed_train_samples + SAMPLES, args.consumed_valid_samples + SAMPLES
    # As many evaluations as in the whole run: it may have had more before.
    data = build_data(config, args, ends[0], SAMPLES, 0)
    read: dict[str, list[int]] = {}
    for split in ("train", "valid"):
        iterator = getattr(data, split)
        read[split] = []
        for _ in range(SAMPLES // args.data_parallel_size):
            read[split] += next(iterator).tokens[0].tolist()
    data.close()
    args.consumed_train_samples, args.consumed_valid_samples = ends
    return read, {name: getattr(args, name) for name in SAVED}


def warnings_of(flags: Sequence[str]) -> list[str]:
    """What a run is warned of when its data is opened. Collective."""
    from megatron_patches.loop import data

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    args = parse([*flags, "--vocab-size", str(DOCUMENTS.sum())])
    start_processes(args)
    data.logger.addHandler(handler)
    data.build_data(DistcaConfig.from_args(args), args, 4, 0, 0).close()
    data.logger.removeHandler(handler)
    return said


def test_a_dataset_smaller_than_a_window_is_warned_of(ranks, prefix) -> None:
    """Documents come again in it; one rank tells."""
    common = ["--data-path", prefix, "--split", "1", "--global-batch-size", "2"]
    # A window is two ranks' tokens: about nine and eleven tenths of the dataset.
    for tenths, warned in ((9, False), (11, True)):
        length = int(DOCUMENTS.sum()) * tenths // 20 // 128 * 128
        first, second = ranks.run(warnings_of, [*common, "--seq-length", str(length)], world_size=2)
        assert second == []
        assert [f"a window of {2 * length} tokens" in said for said in first] == [True] * warned


def test_every_token_comes_once_whatever_the_sequence_lengths_and_ranks(ranks, prefix) -> None:
    common = ["--data-path", prefix, "--split", "60,40,0", "--global-batch-size", "2"]

    def read(
        seq_length: int, world_size: int, saved: dict[str, Any] | None, *more: str
    ) -> tuple[dict[str, list[int]], dict[str, Any]]:
        flags = [*common, "--seq-length", str(seq_length), *more]
        of_ranks = ranks.run(read_samples, flags, saved, world_size=world_size)
        tokens: dict[str, list[int]] = {"train": [], "valid": []}
        for split in tokens:
            # A window is the ranks' tokens one after the other.
            parts = [np.reshape(each[split], (-1, seq_length)) for each, _ in of_ranks]
            tokens[split] = np.stack(parts, axis=1).ravel().tolist()
        return tokens, of_ranks[0][1]

    first, saved = read(128, 2, None)
    second, saved = read(512, 1, saved)
    third, saved = read(256, 2, saved)
    # Pieces stay the windows of the first run.
    whole, _ = read(896, 1, None, "--distca-max-document-length", "256")
    for split in ("train", "valid"):
        resumed = first[split] + second[split] + third[split]
        assert resumed == whole[split]
        assert len(set(resumed)) == SAMPLES * (128 + 512 + 256)


SAVED = {
    "seq_length": 256,
    "data_parallel_size": 4,
    "distca_max_document_length": None,
    "train_stream_start": 1000,
    "valid_stream_start": -1000,
    "consumed_train_samples": 10,
    "consumed_valid_samples": 3,
}


def resumed(saved: dict[str, Any], *flags: str) -> list[Any]:
    from megatron_patches.parts import parse_args
    from support.models import MODEL

    flags = (*MODEL, "--train-iters", "10", "--data-path", "unused", *flags)
    args = parse_args(flags, world_size=2)
    config = go_on_from(saved, DistcaConfig.from_args(args), args)
    return [config.documents.max_length, args.train_stream_start, args.valid_stream_start]


def test_the_place_is_kept_in_tokens(caplog) -> None:
    caplog.set_level(logging.INFO)
    # Sample 10 was token 3560, and sample 3 of validation was token -232.
    assert resumed(SAVED, "--seq-length", "256") == [1024, 1000, -1000]
    assert caplog.messages == []
    assert resumed(SAVED, "--seq-length", "384") == [1024, 3560 - 3840, -232 - 1152]
    assert caplog.messages == [
        "--seq-length was 256, now 384: training continues at token 3560 of the stream, where the "
        "checkpoint ended"
    ]


def test_another_bound_of_documents_is_told(caplog) -> None:
    given = ["--seq-length", "256", "--distca-max-document-length"]
    assert resumed(SAVED, *given, "512") == [512, 1000, -1000]
    (message,) = caplog.messages
    assert "at most 1024 tokens, now 512" in message
    assert resumed(SAVED | {"distca_max_document_length": 512}, *given, "512")[0] == 512
    assert caplog.messages == [message]
    assert resumed(SAVED | {"distca_chain": 2}, *given[:2]) == [2048, 1000, -1000]


@pytest.mark.parametrize("megatron_s", [{"dataloader_type": "single"}, {"train_stream_start": ...}])
def test_a_checkpoint_of_megatron_s_own_data_is_told(caplog, megatron_s: dict[str, Any]) -> None:
    saved = {k: v for k, v in (SAVED | megatron_s).items() if v is not ...}
    assert resumed(saved, "--seq-length", "384") == [None, 0, 0]
    (message,) = caplog.messages
    assert "no position in our order of the data" in message


def test_weights_alone_leave_no_place(caplog) -> None:
    saved = SAVED | {"consumed_train_samples": 0, "consumed_valid_samples": 0}
    assert resumed(saved, "--seq-length", "384") == [None, 0, 0]
    assert caplog.messages == []


def test_sharing_or_no_longer_sharing_is_told(caplog) -> None:
    shared = {"distca_share_prefixes": True}
    resumed(SAVED | shared, "--seq-length", "256")
    (message,) = caplog.messages
    assert "the checkpoint's run was with --distca-share-prefixes" in message
    flags = ["--sft", "--distca", "--distca-share-prefixes"]
    flags += ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "folder"]
    caplog.clear()
    resumed(SAVED | shared | {"sft": True}, "--seq-length", "256", *flags)
    assert caplog.messages == []
