"""A real corpus that is always there: the source code of Python's standard library.

Two datasets, which training mixes by their weights, so that a few long documents meet many short
ones:

* `python_packages`: the files of each package joined into one repository-level document;
* `python_functions`: of the modules that are a single file, each function and method.

Both are the same wherever the same Python is installed.

    python -m data.demo_corpus --output-dir demo/data
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from distca.documents.dataset import sole_writer, train_tokenizer, write_dataset
from distca.documents.tokenizer import build_tokenizer
from distca.plan.span import Int64s
from distca.progress import track
from megatron_patches.batches.stream import Corpus

_TOKENIZER_SAMPLE = 4_000_000
"""Characters that the tokenizer is trained on: enough for a few thousand merges, and quick."""

_SMALL_FILE_BYTES = 400_000
"""Larger files are tables of data rather than code."""

_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests")

_LONGEST_SHARE = 20
"""Fraction of all packages' text, one over this, that bounds a package's document."""

_DEFINITION = re.compile(r"^(?: {4})?(?:@.*\n(?: {4})?)*(?:async def|def|class) ", re.MULTILINE)
"""Beginning of a function, a method or a class, with its decorators."""

logger = logging.getLogger(__name__)


def packages() -> Iterator[tuple[Path, list[Path]]]:
    """Yields each package and module of the standard library with its source files.

    Tests, hidden and private ones, and what is not the library's own are left out.
    """
    for entry in sorted(Path(sysconfig.get_path("stdlib")).iterdir()):
        if entry.name in _LEFT_OUT or entry.name[0] in "._":
            continue
        files = [entry] if entry.suffix == ".py" else sorted(entry.rglob("*.py"))
        files = [f for f in files if f.is_file() and f.stat().st_size <= _SMALL_FILE_BYTES]
        if files:
            yield entry, files


def package_documents(max_characters: int) -> list[str]:
    """Makes one text of each package of several files, until there is as much text."""
    longest = max_characters // _LONGEST_SHARE
    documents: list[str] = []
    left = max_characters
    for package, files in packages():
        if not package.is_dir():
            continue
        parts: list[str] = []
        size = 0
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            parts.append(f"# file: {file.relative_to(package.parent).as_posix()}\n{text}\n")
            size += len(parts[-1])
            if size >= longest:
                break
        documents.append("".join(parts)[: min(longest, left)])
        left -= len(documents[-1])
        if left <= 0:
            break
    return documents


def function_documents(max_characters: int) -> list[str]:
    """Makes one text of each function of modules of one file, until there is as much text."""
    documents: list[str] = []
    left = max_characters
    for module, files in packages():
        if module.is_dir():
            continue
        text = files[0].read_text(encoding="utf-8", errors="replace")
        edges = [0, *(found.start() for found in _DEFINITION.finditer(text)), len(text)]
        for start, end in itertools.pairwise(edges):
            if not text[start:end].strip():
                continue
            documents.append(text[start:end][:left])
            left -= len(documents[-1])
            if left <= 0:
                return documents
    return documents


DATASETS = {"python_packages": package_documents, "python_functions": function_documents}
"""Functions that make the datasets' documents, by file name."""


def build_demo_corpus(
    output_dir: Path, vocab_size: int = 2048, max_megabytes: float = 5, *, force: bool = False
) -> list[Path]:
    """Writes the datasets and their tokenizer, unless the same are there already.

    Args:
        output_dir: folder for all files.
        vocab_size: tokens of the tokenizer that is trained.
        max_megabytes: bound of each dataset's text, in millions of characters.
        force: whether to write the datasets anew in any case.

    Returns:
        The prefixes for `--data-path`; the folder `output_dir/tokenizer` is the tokenizer.

    Raises:
        ValueError: the vocabulary is too small, `max_megabytes` leaves no text, or another process
            writes the datasets.
    """
    if not max_megabytes * 1e6 >= _LONGEST_SHARE:
        raise ValueError(f"--max-megabytes {max_megabytes} leaves no text")
    prefixes, model = [output_dir / name for name in DATASETS], output_dir / "tokenizer"
    source = f"Python's standard library, at most {max_megabytes:g} MB, {vocab_size} tokens"
    if not force and model.is_dir() and all(_is_of(prefix, source) for prefix in prefixes):
        logger.info("%s is there already", output_dir)
        return prefixes
    documents = [of_dataset(int(max_megabytes * 1e6)) for of_dataset in DATASETS.values()]
    everything = [text for of_dataset in documents for text in of_dataset]
    # The sample has every n-th document, so that it is of all kinds.
    stride = max(1, sum(map(len, everything)) // _TOKENIZER_SAMPLE)
    with sole_writer(model) as unfinished:
        for prefix in prefixes:
            Path(f"{prefix}.idx").unlink(missing_ok=True)
        train_tokenizer(everything[::stride], vocab_size, model)
        tokenizer = build_tokenizer("HuggingFaceTokenizer", str(model))
        for prefix, of_dataset in zip(prefixes, documents, strict=True):
            write_dataset(
                track(of_dataset, f"tokenize {prefix.name}", "documents"),
                tokenizer,
                "HuggingFaceTokenizer",
                prefix,
                unfinished,
                workers=os.cpu_count() or 1,
                source=source,
            )
    return prefixes


def _is_of(prefix: Path, source: str) -> bool:
    """Whether a complete dataset of that source is there."""
    sidecar = Path(f"{prefix}.json")
    if not Path(f"{prefix}.idx").is_file() or not sidecar.is_file():
        return False
    return bool(json.loads(sidecar.read_text()).get("source") == source)


def histogram(lengths: Int64s, width: int = 40) -> str:
    """Draws a histogram of documents' lengths, with shares of all tokens, as lines of text."""
    powers = np.floor(np.log2(lengths)).astype(np.int64)
    counts = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths) / lengths.sum()
    return "\n".join(
        f"{1 << power:>9} - {(2 << power) - 1:<9} {counts[power]:>6} documents "
        f"{tokens[power]:>6.1%} of tokens  {'#' * round(width * counts[power] / counts.max())}"
        for power in range(int(powers.min()), len(counts))
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, required=True, help="the folder for all files")
    parser.add_argument(
        "--vocab-size", type=int, default=2048, help="tokens of the tokenizer (default: 2048)"
    )
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=5,
        help="millions of characters of each dataset at most (default: 5)",
    )
    parser.add_argument("--force", action="store_true", help="make it anew where it exists")
    parser.add_argument("--histogram", action="store_true", help="print how long documents are")
    args = parser.parse_args(argv)
    try:
        prefixes = build_demo_corpus(
            args.output_dir, args.vocab_size, args.max_megabytes, force=args.force
        )
    except ValueError as error:
        parser.error(str(error))
    for prefix in prefixes:
        lengths = Corpus(str(prefix)).lengths
        print(
            f"{prefix}: {len(lengths):,} documents, {lengths.sum():,} tokens; median "
            f"{np.median(lengths):,.0f}, longest {lengths.max():,}"
        )
        if args.histogram:
            print(histogram(lengths))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
