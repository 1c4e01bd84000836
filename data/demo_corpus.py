"""A real corpus that is always there: the source code of Python's standard library.

The files of each of its packages are joined into one repository-level document, whose lengths have
a long tail of their own. It is the same wherever the same Python is installed.

    python -m data.demo_corpus --output-dir demo/data
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.prepare import train_tokenizer, write_dataset
from distca.plan.span import Int64s
from megatron_patches.stream import Corpus
from megatron_patches.tokenizer import build_tokenizer

_NAME = "python_source"

_TOKENIZER_SAMPLE = 4_000_000
"""Characters that the tokenizer is trained on: enough for a few thousand merges, and quick."""

_SMALL_FILE_BYTES = 400_000
"""Larger files are tables of data rather than code."""

_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests")

_LONGEST_SHARE = 20
"""No document is longer than the corpus divided by this."""

logger = logging.getLogger(__name__)


def packages() -> Iterator[tuple[Path, list[Path]]]:
    """Each package and module of the standard library with its source files.

    Tests and what is not the library's own are left out, hidden and private ones, too.
    """
    for entry in sorted(Path(sysconfig.get_path("stdlib")).iterdir()):
        if entry.name in _LEFT_OUT or entry.name[0] in "._":
            continue
        files = [entry] if entry.suffix == ".py" else sorted(entry.rglob("*.py"))
        files = [f for f in files if f.is_file() and f.stat().st_size <= _SMALL_FILE_BYTES]
        if files:
            yield entry, files


def repository_documents(max_characters: int) -> list[str]:
    """One text for each package, until `max_characters` of text are reached."""
    longest = max_characters // _LONGEST_SHARE
    documents: list[str] = []
    left = max_characters
    for package, files in packages():
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


def build_demo_corpus(
    output_dir: Path, vocab_size: int = 4096, max_megabytes: float = 20, *, force: bool = False
) -> Path:
    """Writes the corpus and its tokenizer, unless the same are there already.

    Args:
        output_dir: the folder for them.
        vocab_size: of the tokenizer that is trained.
        max_megabytes: the text's size, in millions of characters.
        force: write them anew in any case.

    Returns:
        The prefix for `--data-path`; `output_dir/tokenizer.json` is the tokenizer.

    Raises:
        ValueError: the vocabulary is too small, or there is to be no text.
    """
    if not max_megabytes * 1e6 >= _LONGEST_SHARE:
        raise ValueError(f"--max-megabytes {max_megabytes} leaves no text")
    prefix, model = output_dir / _NAME, output_dir / "tokenizer.json"
    source = f"Python's standard library, at most {max_megabytes:g} MB, {vocab_size} tokens"
    if not force and model.is_file() and _is_of(prefix, source):
        logger.info("%s is there already", prefix)
        return prefix
    documents = repository_documents(int(max_megabytes * 1e6))
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    # Every n-th document, so that the sample is of all kinds.
    step = max(1, sum(map(len, documents)) // _TOKENIZER_SAMPLE)
    train_tokenizer(documents[::step], vocab_size, model)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(model))
    write_dataset(
        tqdm(documents, desc="tokenize", unit=" documents", disable=None),
        tokenizer,
        "HuggingFaceTokenizer",
        prefix,
        workers=os.cpu_count() or 1,
        source=source,
    )
    return prefix


def _is_of(prefix: Path, source: str) -> bool:
    """Whether a complete dataset is there, of that source."""
    sidecar = Path(f"{prefix}.json")
    if not Path(f"{prefix}.idx").is_file() or not sidecar.is_file():
        return False
    return bool(json.loads(sidecar.read_text()).get("source") == source)


def histogram(lengths: Int64s, width: int = 40) -> str:
    """How many documents have how many tokens, and their share of all tokens, as lines of text."""
    powers = np.floor(np.log2(lengths)).astype(np.int64)
    counts = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths) / lengths.sum()
    return "\n".join(
        f"{1 << power:>9} - {(2 << power) - 1:<9} {counts[power]:>6} documents "
        f"{tokens[power]:>6.1%} of tokens  {'#' * round(width * counts[power] / counts.max())}"
        for power in range(int(powers.min()), len(counts))
    )


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-megabytes", type=float, default=20)
    parser.add_argument("--force", action="store_true", help="make it anew where it exists")
    args = parser.parse_args(argv)
    try:
        prefix = build_demo_corpus(
            args.output_dir, args.vocab_size, args.max_megabytes, force=args.force
        )
    except ValueError as error:
        parser.error(str(error))
    lengths = Corpus(str(prefix)).lengths
    print(f"{prefix}: {len(lengths)} documents, {lengths.sum()} tokens")
    shares = (50, 90, 99, 100)
    quantiles = (f"{share}%: {np.percentile(lengths, share):.0f}" for share in shares)
    print(f"tokens in a document: mean {lengths.mean():.0f}; quantiles {', '.join(quantiles)}")
    print(histogram(lengths))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
