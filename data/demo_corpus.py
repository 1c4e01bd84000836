"""A real corpus that is always there: the Python source code that is installed.

The files of each package of the standard library and of site-packages are joined into one
repository-level document, whose lengths have a long tail of their own.

    python -m data.demo_corpus --output-dir demo/data
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.prepare import train_tokenizer, write_dataset
from megatron_patches.stream import Corpus
from megatron_patches.tokenizer import build_tokenizer

_TOKENIZER_SAMPLE_BYTES = 4_000_000
"""Text that the tokenizer is trained on: enough for a few thousand merges, and quick."""

_SMALL_FILE_BYTES = 400_000
"""Larger files are tables of data rather than code."""


def packages() -> Iterator[tuple[str, list[Path]]]:
    """Name and source files of each package and module: first the standard library's."""
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for entry in sorted(Path(folder).iterdir()):
            if entry.name in ("site-packages", "test", "__pycache__") or entry.name[0] in "._":
                continue
            files = [entry] if entry.suffix == ".py" else sorted(entry.rglob("*.py"))
            files = [file for file in files if file.stat().st_size <= _SMALL_FILE_BYTES]
            if files:
                yield entry.stem, files


def repository_documents(max_bytes: int, max_package_bytes: int) -> list[str]:
    """One text for each package, until `max_bytes` of text are reached."""
    documents = []
    total = 0
    for _, files in packages():
        parts = []
        size = 0
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            parts.append(f"# file: {file.parent.name}/{file.name}\n{text}")
            size += len(parts[-1])
            if size >= max_package_bytes:
                break
        documents.append("\n".join(parts)[:max_package_bytes])
        total += len(documents[-1])
        if total >= max_bytes:
            break
    return documents


def build_demo_corpus(output_dir: Path, vocab_size: int = 4096, max_megabytes: float = 20) -> Path:
    """Writes the corpus and its tokenizer unless they are there already.

    Returns:
        The prefix for `--data-path`; `output_dir/tokenizer.json` is the tokenizer.
    """
    prefix = output_dir / "python_source"
    if prefix.with_suffix(".idx").is_file():
        return prefix
    max_bytes = int(max_megabytes * 1e6)
    documents = repository_documents(max_bytes, max_package_bytes=max(max_bytes // 20, 10_000))
    # Every n-th document, so that the sample is of all kinds.
    step = max(1, sum(map(len, documents)) // _TOKENIZER_SAMPLE_BYTES)
    train_tokenizer(documents[::step], vocab_size, output_dir / "tokenizer.json")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(output_dir))
    write_dataset(documents, tokenizer, "HuggingFaceTokenizer", prefix)
    return prefix


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-megabytes", type=float, default=20)
    args = parser.parse_args(argv)
    prefix = build_demo_corpus(args.output_dir, args.vocab_size, args.max_megabytes)
    lengths = Corpus(str(prefix)).lengths
    print(f"{prefix}: {len(lengths)} documents, {lengths.sum()} tokens")
    shares = (50, 90, 99, 100)
    quantiles = (f"{share}%: {np.percentile(lengths, share):.0f}" for share in shares)
    print(f"tokens in a document: mean {lengths.mean():.0f}; quantiles {', '.join(quantiles)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
