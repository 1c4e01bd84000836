"""Datasets of the splits, as Megatron-LM's flags name them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_patches.batches.blends import (
    SPLITS,
    Blend,
    check_blends,
    find_blend,
    sets_of,
)
from megatron_patches.batches.stream import TokenStream
from megatron_patches.flags.config import DocumentsConfig
from support.whole_runs import write_documents

FILES = DocumentsConfig()


def args(**given: object) -> Namespace:
    common = {"split": "90,10", "eval_iters": 1, "multiple_validation_sets": False}
    common |= {"full_validation": False, "data_path": None, "data_args_path": None}
    common |= {"per_split_data_args_path": None}
    common |= dict.fromkeys(f"{split}_data_path" for split in SPLITS)
    return Namespace(**common | given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"valid_data_path": ["0.3", "a", "0.7", "b"]}, "give the validation sets without weights"),
        ({"validation_set_names": ["a"]}, "has 1 names, but there are 2 validation sets"),
        ({"test_data_path": ["c"]}, "allows no test set"),
    ],
)
def test_what_goes_not_with_several_sets_is_refused(given: dict[str, object], said: str) -> None:
    common = {"train_data_path": ["a"], "valid_data_path": ["a", "b"]}
    several = args(full_validation=True, multiple_validation_sets=True, **common | given)
    with pytest.raises(ValueError, match=said):
        sets_of(several, check_blends(FILES, several, SPLITS)["valid"])


@pytest.mark.parametrize("weight", ["1e308", "nan", "inf", "0", "-1"])
def test_weights_that_are_no_shares_are_refused(weight: str) -> None:
    with pytest.raises(ValueError, match="every weight must be positive"):
        find_blend(FILES, args(data_path=[weight, "a", "1e308", "b"]), "train")


def test_each_prefix_is_a_set_of_its_own_only_if_asked_for() -> None:
    blend = Blend(("a", "b"), None, None)
    assert sets_of(args(), blend) == sets_of(args(full_validation=True), blend) == [blend]
    several = args(full_validation=True, multiple_validation_sets=True)
    assert sets_of(several, blend) == [Blend((name,), None, None) for name in "ab"]


def test_a_blend_has_prefixes_or_weights_too() -> None:
    alone, weighted = ["a"], ["0.3", "a", "0.7", "b"]
    assert find_blend(FILES, args(train_data_path=alone), "train") == Blend(("a",), None, None)
    assert find_blend(FILES, args(train_data_path=weighted), "train") == Blend(
        ("a", "b"), (0.3, 0.7), None
    )


@pytest.mark.parametrize(
    "path", [["0", "a", "1", "b"], ["-1", "a"], ["nan", "a"], ["x", "a", "0.5", "b"]]
)
def test_unusable_blends_are_refused(path: list[str]) -> None:
    with pytest.raises(ValueError, match="--data-path"):
        find_blend(FILES, args(data_path=path), "train")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"data\.txt is empty: give the prefix"):
        find_blend(FILES, args(data_args_path=str(tmp_path / "data.txt")), "train")


def test_one_blend_gives_each_split_a_part(tmp_path: Path) -> None:
    file = tmp_path / "data.txt"
    file.write_text("0.3 a\n0.7 b\n")
    for given in ({"data_path": ["0.3", "a", "0.7", "b"]}, {"data_args_path": str(file)}):
        for which in SPLITS:
            assert find_blend(FILES, args(**given), which) == Blend(("a", "b"), (0.3, 0.7), "90,10")


def test_blends_of_splits_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"train": "0.3 a 0.7 b", "valid": ["c"], "test": None}))
    words = {"train_data_path": ["0.3", "a", "0.7", "b"], "valid_data_path": ["c"]}
    for given in (words, {"per_split_data_args_path": str(file)}):
        found = check_blends(FILES, args(**given), SPLITS)
        assert found == {
            "train": Blend(("a", "b"), (0.3, 0.7), None),
            "valid": Blend(("c",), None, None),
        }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give --data-path"),
        ({"data_path": ["a"], "valid_data_path": ["b"]}, "--valid-data-path name data twice"),
        ({"data_path": ["a"], "data_args_path": "b"}, "--data-path and --data-args-path name"),
        ({"data_args_path": "/none"}, "--data-args-path /none does not exist: give a file"),
        ({"per_split_data_args_path": __file__}, "has the wrong form"),
        ({"valid_data_path": ["a"]}, "give --train-data-path"),
        ({"train_data_path": ["a"]}, "give --valid-data-path, or --eval-iters 0"),
        ({"train_data_path": ["1", "a", "b", "c"], "valid_data_path": ["a"]}, "--train-data-path"),
    ],
)
def test_what_names_no_data_or_too_many_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_blends(FILES, args(**given), SPLITS)


def test_a_split_of_its_own_reads_all_documents(tmp_path: Path) -> None:
    blend = Blend((write_documents(tmp_path / "c", [3] * 20),), None, None)
    streams = [TokenStream.open(blend, which, seed=1, num_tokens=60) for which in SPLITS]
    for stream in streams:
        assert sorted(stream.document.tolist()) == list(range(20))
