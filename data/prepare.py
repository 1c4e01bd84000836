"""Text or JSONL to Megatron's indexed token files, one sequence a document.

    python -m data.prepare --input notes/ more.jsonl --output-prefix corpus \\
        --tokenizer-type HuggingFaceTokenizer --train-tokenizer 4096
"""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tqdm import tqdm

from megatron_patches.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

_DOCUMENTS_PER_WORKER = 64
"""Documents that a worker is given at a time: as many texts are held in memory."""

_SUFFIXES = (".bin", ".json", ".idx")
"""Of a dataset's files, in the order in which they appear: with the index it is complete."""


def find_files(inputs: Iterable[str]) -> list[Path]:
    """The files of paths, folders and patterns (`notes/**/*.md`), in order, hidden ones left out.

    Raises:
        ValueError: a path does not exist, or a pattern or folder has no file.
    """
    files = []
    for given in inputs:
        if Path(given).exists():
            paths = [Path(given)]
        else:
            paths = sorted(Path(found) for found in glob.glob(given, recursive=True))
        found = [file for path in paths for file in _files_below(path)]
        if not found:
            raise ValueError(f"--input {given} does not exist or holds no file")
        files += found
    return files


def _files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    )


def read_documents(
    files: Iterable[Path], json_key: str, advance: Callable[[int], object] = lambda _: None
) -> Iterator[str]:
    """The documents of files: a line of a `.jsonl` file, or the whole of another file as text.

    Args:
        files: what to read, as UTF-8.
        json_key: the text's key in a line.
        advance: told the number of bytes that each document took.

    Raises:
        ValueError: a line has no such key.
    """
    for path in files:
        if path.suffix == ".jsonl":
            yield from _read_json_lines(path, json_key, advance)
        else:
            content = path.read_bytes()
            yield content.decode("utf-8", errors="replace")
            advance(len(content))


def _read_json_lines(path: Path, json_key: str, advance: Callable[[int], object]) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    text = json.loads(line)[json_key]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number}: no JSON object with the key {json_key!r}"
                    ) from error
                if not isinstance(text, str):
                    raise ValueError(f"{path}, line {number}: {json_key!r} is no text")
                yield text
            advance(len(line))


def train_tokenizer(texts: Iterable[str], vocab_size: int, output: Path) -> None:
    """Trains a byte-level BPE on texts and saves it as a `tokenizer.json`.

    Raises:
        ValueError: the vocabulary does not hold the 256 bytes and the end token.
    """
    if vocab_size < 257:
        raise ValueError(f"a byte-level vocabulary needs at least 257 tokens, not {vocab_size}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    output.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output))


def write_dataset(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    tokenizer_type: str,
    prefix: Path,
    *,
    workers: int = 1,
    source: str = "",
) -> tuple[int, int]:
    """Writes `prefix.bin`, `.idx` and `.json`; an interrupted run leaves no partial dataset.

    Args:
        documents: their texts; empty ones are left out.
        tokenizer: the token after each document is its `eod`.
        tokenizer_type: noted in the `.json`, like its vocabulary.
        prefix: path of the files, without suffix.
        workers: threads that tokenize.
        source: noted in the `.json`: what the texts are.

    Returns:
        The number of documents and of tokens, document ends included.

    Raises:
        ValueError: there is no document.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = prefix.with_name(f".{prefix.name}.unfinished")
    try:
        builder = IndexedDatasetBuilder(
            f"{unfinished}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
        )
        count = tokens = 0
        with builder.data_file:
            for ids in _tokenize(documents, tokenizer, workers):
                builder.add_document(np.array([*ids, tokenizer.eod]), [len(ids) + 1])
                count += 1
                tokens += len(ids) + 1
            if not count:
                raise ValueError("the input holds no text")
            builder.finalize(f"{unfinished}.idx")
        description = {
            "tokenizer_type": tokenizer_type,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            "documents": count,
            "tokens": tokens,
            "source": source,
        }
        Path(f"{unfinished}.json").write_text(json.dumps(description, indent=2) + "\n")
        # An older dataset loses its index first, so that no index ever meets another's tokens.
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        for suffix in _SUFFIXES:
            os.replace(f"{unfinished}{suffix}", f"{prefix}{suffix}")
    finally:
        for suffix in _SUFFIXES:
            Path(f"{unfinished}{suffix}").unlink(missing_ok=True)
    return count, tokens


def _tokenize(documents: Iterable[str], tokenizer: Tokenizer, workers: int) -> Iterator[list[int]]:
    """The token ids of each document that has any, in order."""
    remaining = iter(documents)
    with ThreadPoolExecutor(workers) as pool:
        while batch := list(itertools.islice(remaining, _DOCUMENTS_PER_WORKER * workers)):
            yield from (ids for ids in pool.map(tokenizer.tokenize, batch) if ids)


def prepare(
    inputs: Iterable[str],
    prefix: Path,
    *,
    json_key: str = "text",
    tokenizer_type: str = "HuggingFaceTokenizer",
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    train_vocab_size: int | None = None,
    workers: int = 1,
) -> tuple[int, int]:
    """What the command does; its arguments are the command's flags.

    Returns:
        The number of documents and of tokens, document ends included.

    Raises:
        ValueError: a flag contradicts another; or see the functions above.
    """
    if workers < 1:
        raise ValueError(f"--workers {workers}: at least one is needed")
    other_tokenizer = tokenizer_type != "HuggingFaceTokenizer" or tokenizer_model is not None
    if train_vocab_size is not None and other_tokenizer:
        raise ValueError(
            "--train-tokenizer makes a HuggingFaceTokenizer: give neither another "
            "--tokenizer-type nor a --tokenizer-model"
        )
    if vocab_size is not None and tokenizer_type != "NullTokenizer":
        raise ValueError(f"--vocab-size is for NullTokenizer, not for {tokenizer_type}")
    files = find_files(inputs)
    written = {Path(f"{prefix}{suffix}").resolve() for suffix in (*_SUFFIXES, ".tokenizer.json")}
    for file in files:
        if file.resolve() in written:
            raise ValueError(f"--input {file} would be overwritten: give another --output-prefix")

    size = sum(file.stat().st_size for file in files)

    def documents(doing: str) -> Iterator[str]:
        with tqdm(desc=doing, total=size, unit="B", unit_scale=True, disable=None) as bar:
            yield from read_documents(files, json_key, bar.update)

    if train_vocab_size is None:
        tokenizer = build_tokenizer(tokenizer_type, tokenizer_model, vocab_size)
        return write_dataset(
            documents("tokenize"), tokenizer, tokenizer_type, prefix, workers=workers
        )
    unfinished = prefix.with_name(f".{prefix.name}.unfinished.tokenizer.json")
    try:
        train_tokenizer(documents("train tokenizer"), train_vocab_size, unfinished)
        tokenizer = build_tokenizer(tokenizer_type, str(unfinished))
        written_now = write_dataset(
            documents("tokenize"), tokenizer, tokenizer_type, prefix, workers=workers
        )
        os.replace(unfinished, f"{prefix}.tokenizer.json")
    finally:
        unfinished.unlink(missing_ok=True)
    return written_now


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, folders or patterns"
    )
    parser.add_argument("--json-key", default="text", help="the text's key in a .jsonl line")
    parser.add_argument(
        "--output-prefix", type=Path, required=True, help="of PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        default="HuggingFaceTokenizer",
        help="kind of tokenizer",
    )
    parser.add_argument("--tokenizer-model", help="a tokenizer.json, or its folder")
    parser.add_argument("--vocab-size", type=int, help="for NullTokenizer")
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB",
        help="train a byte-level BPE of this size on the input: PREFIX.tokenizer.json",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="threads. Default: the machine's cores.",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        count, tokens = prepare(
            args.input,
            args.output_prefix,
            json_key=args.json_key,
            tokenizer_type=args.tokenizer_type,
            tokenizer_model=args.tokenizer_model,
            vocab_size=args.vocab_size,
            train_vocab_size=args.train_tokenizer,
            workers=args.workers,
        )
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.output_prefix}: {count} documents, {tokens} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
