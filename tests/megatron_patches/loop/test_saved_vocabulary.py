"""A checkpoint's embedding has as many rows as the run's, whatever parallel size pads it."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_patches.loop.preflight import check_first_weights
from megatron_patches.loop.saved_vocabulary import check_vocabulary
from support.pretraining import run
from support.whole_runs import write_documents


def flags(kind: str, vocab_size: int | None, padded: int | None, parallel: int = 1) -> Namespace:
    return Namespace(
        tokenizer_type=kind,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        tensor_model_parallel_size=parallel,
    )


@pytest.mark.parametrize(
    ("saved", "now", "remedy"),
    [
        (flags("A", 250, 256), flags("A", 250, 512, 2), "--make-vocab-size-divisible-by 128"),
        (flags("A", 250, 252), flags("A", 250, 384, 3), "--make-vocab-size-divisible-by 84"),
        (flags("A", 250, 256), flags("A", 250, 384, 3), "-parallel-size that divides 256"),
        (
            flags("NullTokenizer", 100, 128),
            flags("NullTokenizer", 110, 128),
            "give the --vocab-size",
        ),
    ],
)
def test_another_vocabulary_is_refused(saved, now, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        check_vocabulary(saved, now, Path("saved"))


def test_the_same_vocabulary_is_taken() -> None:
    null, path = flags("NullTokenizer", 100, 128), Path("saved")
    check_vocabulary(null, flags("NullTokenizer", 101, 128, 2), path)
    check_vocabulary(null, flags("A", 90, 128), path)


def test_rows_are_read_where_a_converter_left_no_flags(tmp_path) -> None:
    weights = {"embedding.word_embeddings.weight": torch.ones(128, 4)}
    dcp.save(weights, checkpoint_id=tmp_path / "weights", no_dist=True)
    check_vocabulary(Namespace(), flags("A", 90, 128), tmp_path / "weights")
    with pytest.raises(ValueError, match=r"to 128 rows, .* --make-vocab-size-divisible-by 64"):
        check_vocabulary(Namespace(), flags("A", 90, 256, 2), tmp_path / "weights")
    dcp.save({"head": torch.ones(1)}, checkpoint_id=tmp_path / "head", no_dist=True)
    check_vocabulary(Namespace(), flags("A", 90, 256, 2), tmp_path / "head")


def test_the_remedy_loads(tmp_path) -> None:
    data = write_documents(tmp_path / "documents", [500, 470, 130] * 20)
    padding = ["--make-vocab-size-divisible-by", "100"]
    run(1, data, *padding, "--train-iters", "2", "--save", str(tmp_path / "saved"))
    load = ["--load", str(tmp_path / "saved"), "--train-iters", "3", "--distca"]
    load += ["--tensor-model-parallel-size", "2", "--override-opt_param-scheduler"]
    _, output = run(2, data, *padding, *load, status=2)
    assert "padded to 300 rows, but this run pads it to 400" in output
    assert "give --make-vocab-size-divisible-by 150" in output
    losses, _ = run(2, data, "--make-vocab-size-divisible-by", "150", *load)
    assert [*losses] == [3]


def test_first_weights_have_the_run_s_rows(tmp_path) -> None:
    """A run that starts from other weights would pad their embeddings without a word."""
    weights = {"embedding.word_embeddings.weight": torch.ones(128, 4)}
    dcp.save(weights, checkpoint_id=tmp_path / "first" / "iter_0000000", no_dist=True)
    (tmp_path / "first" / "latest_checkpointed_iteration.txt").write_text("0")
    first = {"pretrained_checkpoint": str(tmp_path / "first"), "load": None, "ckpt_step": None}
    check_first_weights(Namespace(**vars(flags("A", 90, 128)) | first))
    other = vars(flags("A", 90, 256, 2)) | first
    with pytest.raises(ValueError, match=r"to 128 rows, .* --make-vocab-size-divisible-by 64"):
        check_first_weights(Namespace(**other))
    # A run that continues does not start from them.
    save = tmp_path / "save"
    shutil.copytree(tmp_path / "first", save)
    check_first_weights(Namespace(**other | {"load": str(save)}))
    check_first_weights(Namespace(**other | {"pretrained_checkpoint": None}))
