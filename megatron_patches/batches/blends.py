"""The datasets of each split, with their weights, as Megatron-LM's flags name them.

One blend for all splits, of whose documents `--split` gives each split a part:

    --data-path a b | 0.3 a 0.7 b         --data-args-path FILE    a file that holds such a line

or a blend for each split, whose documents are all of it:

    --train-data-path, --valid-data-path, --test-data-path
    --per-split-data-args-path FILE       {"train": "0.3 a 0.7 b", "valid": ["c"], "test": ["c"]}

or a function that gives each split a list of documents of its own:

    --distca-documents MODULE:FUNCTION
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from megatron.core.datasets.utils import get_blend_from_list

from distca.json_files import read_text
from megatron_patches.batches.custom_dataset import custom_dataset
from megatron_patches.flags.config import DocumentsConfig
from megatron_patches.versions import newer_flag

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

_PER_SPLIT = "per_split_data_args_path"
_SOURCES = ("data_path", "data_args_path", _PER_SPLIT)
_FLAGS = (
    "--data-path with --split, --data-args-path, --train-data-path with --valid-data-path and "
    "--test-data-path, --per-split-data-args-path, or --distca-documents"
)


@dataclass(frozen=True)
class Blend:
    """Datasets of a split.

    Attributes:
        prefixes: their paths without `.bin` or `.idx`.
        weights: shares of the tokens; None: each dataset counts by its size.
        split: Megatron's `--split`, which gives the split a part of the documents; None: all are
            the split's.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    split: str | None


def find_blend(documents: DocumentsConfig, args: Namespace, which: Split) -> Blend | None:
    """Finds the datasets of a split; None: flags give the other splits theirs, and this one none.

    Raises:
        ValueError: the flags name no data, or several sources of it, or cannot be read.
    """
    of_splits = [name for name in _names_of_splits() if vars(args)[name]]
    sources = [name for name in _SOURCES if vars(args)[name]]
    own = [] if documents.function is None else ["distca_documents"]
    if len(sources) + len(own) + bool(of_splits) != 1:
        given = " and ".join(_flag(name) for name in [*sources, *own, *of_splits])
        raise ValueError(
            f"give {_FLAGS}" if not given else f"{given} name data twice: give one of {_FLAGS}"
        )
    if of_splits:
        words = vars(args)[f"{which}_data_path"]
        return _blend(words, _flag(f"{which}_data_path"), None) if words else None
    if documents.function is not None:
        there = custom_dataset(args, documents.function, which) is not None
        return Blend((documents.function,), None, None) if there else None
    (source,) = sources
    value = vars(args)[source]
    if source == "data_path":
        return _blend(value, _flag(source), args.split)
    file = f"{_flag(source)} {value}"
    text = read_text(Path(value), "give a file of paths of data", _flag(source))
    if source == "data_args_path":
        return _blend(text.split(), file, args.split)
    words = _words_of_splits(file, text)[which]
    return _blend(words, f"{file}, {which}", None) if words else None


def check_blends(
    documents: DocumentsConfig, args: Namespace, splits: Sequence[Split]
) -> dict[Split, Blend]:
    """Finds the datasets of the splits that a run reads.

    Args:
        documents: our flags of documents.
        args: Megatron-LM's arguments.
        splits: splits that the run would read. Without data of its own the test is left out.

    Raises:
        ValueError: see `find_blend`; or there are none to train on, or none to evaluate on.
    """
    blends = ((which, find_blend(documents, args, which)) for which in splits)
    found = {which: blend for which, blend in blends if blend is not None}
    if "train" in splits and "train" not in found:
        raise ValueError("there are no data to train on: give --train-data-path")
    if "valid" in splits and "valid" not in found:
        raise ValueError(
            f"--eval-iters {args.eval_iters} evaluates on data of its own: give "
            "--valid-data-path, or --eval-iters 0"
        )
    if args.multiple_validation_sets and "test" in found:
        raise ValueError(
            "--multiple-validation-sets allows no test set, in Megatron-LM, too: leave out the "
            "test's data"
        )
    return found


def sets_of(args: Namespace, blend: Blend) -> list[Blend]:
    """Returns the validation sets of a blend, each with a loss of its own.

    Raises:
        ValueError: the blend has weights, which whole sets cannot follow; or names of another
            number.
    """
    if not args.full_validation:
        return [blend]
    if blend.weights is not None:
        raise ValueError(
            "--full-validation reads each document once: give the validation sets without weights"
        )
    if not args.multiple_validation_sets:
        return [blend]
    names = newer_flag(args, "validation_set_names")
    if names and len(names) != len(blend.prefixes):
        raise ValueError(
            f"--validation-set-names has {len(names)} names, but there are {len(blend.prefixes)} "
            "validation sets: give one for each"
        )
    return [Blend((prefix,), None, blend.split) for prefix in blend.prefixes]


def _blend(words: Sequence[str], flag: str, split: str | None) -> Blend:
    if not words:
        raise ValueError(f"{flag} is empty: give the prefix of an indexed dataset")
    mixed = f"{flag} {' '.join(words)}: give only prefixes, or a weight before each"
    try:
        prefixes, weights = get_blend_from_list(list(words))
    except AssertionError as error:
        raise ValueError(mixed) from error
    if weights is None and any(
        _is_number(prefix) and not Path(f"{prefix}.idx").exists() for prefix in prefixes
    ):
        raise ValueError(mixed)
    if weights is not None and not (min(weights) > 0 and sum(weights) < np.inf):
        raise ValueError(
            f"{flag} weights {weights}: every weight must be positive, and their sum finite"
        )
    return Blend(tuple(prefixes), None if weights is None else tuple(weights), split)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _words_of_splits(file: str, text: str) -> dict[str, list[str]]:
    """Reads the words of each split's blend from JSON."""
    try:
        saved: Any = json.loads(text)
        words = {each: saved[each] for each in SPLITS}
        found: dict[str, list[str]] = {
            each: value.split() if isinstance(value, str) else [str(word) for word in value or []]
            for each, value in words.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{file} has the wrong form ({error}): give {{"train": "0.3 a 0.7 b", "valid": '
            '["c"], "test": ["c"]}'
        ) from error
    return found


def _names_of_splits() -> list[str]:
    return [f"{which}_data_path" for which in SPLITS]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
