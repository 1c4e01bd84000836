"""Text or JSONL to Megatron's indexed token files, one sequence a document.

    python -m data.prepare --input notes/ more.jsonl --output-prefix corpus \\
        --tokenizer-type HuggingFaceTokenizer --train-tokenizer 4096
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tqdm import tqdm

from megatron_patches.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

_BATCH = 64
"""Documents that are tokenized together."""


def read_documents(inputs: Iterable[Path], json_key: str) -> Iterator[str]:
    """The documents of files and folders: a line of a `.jsonl` file, or a whole other file.

    Raises:
        ValueError: a path does not exist, or a line has no such key.
    """
    for path in inputs:
        if path.is_dir():
            yield from read_documents(sorted(p for p in path.rglob("*") if p.is_file()), json_key)
        elif not path.is_file():
            raise ValueError(f"--input {path} does not exist")
        elif path.suffix == ".jsonl":
            yield from _read_json_lines(path, json_key)
        else:
            yield path.read_text(encoding="utf-8", errors="replace")


def _read_json_lines(path: Path, json_key: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[json_key]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: no JSON object with the key {json_key!r}"
                ) from error
            if not isinstance(text, str):
                raise ValueError(f"{path}, line {number}: {json_key!r} is no text")
            yield text


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
    documents: Iterable[str], tokenizer: Tokenizer, tokenizer_type: str, prefix: Path
) -> tuple[int, int]:
    """Writes `prefix.bin`, `.idx` and `.json`; an interrupted run leaves no partial dataset.

    Returns:
        The number of documents and of tokens, document ends included.

    Raises:
        ValueError: there is no document.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = prefix.with_name(f".{prefix.name}.unfinished")
    builder = IndexedDatasetBuilder(
        f"{unfinished}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    count = tokens = 0
    for ids in _tokenize(tqdm(documents, unit=" documents", disable=None), tokenizer):
        document = np.array([*ids, tokenizer.eod], dtype=np.int64)
        builder.add_document(document, [len(document)])
        count += 1
        tokens += len(document)
    builder.finalize(f"{unfinished}.idx")
    if not count:
        raise ValueError("the input holds no document")
    description = {
        "tokenizer_type": tokenizer_type,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "documents": count,
        "tokens": tokens,
    }
    Path(f"{unfinished}.json").write_text(json.dumps(description, indent=2) + "\n")
    for suffix in (".bin", ".json", ".idx"):
        os.replace(f"{unfinished}{suffix}", f"{prefix}{suffix}")
    return count, tokens


def _tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    together = getattr(tokenizer, "tokenize_many", None)
    if together is None:
        yield from (tokenizer.tokenize(text) for text in documents)
        return
    remaining = iter(documents)
    while batch := list(itertools.islice(remaining, _BATCH)):
        yield from together(batch)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input", nargs="+", type=Path, required=True, metavar="PATH")
    parser.add_argument("--json-key", default="text", help="the text's key in a .jsonl line")
    parser.add_argument("--output-prefix", type=Path, required=True)
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default="HuggingFaceTokenizer")
    parser.add_argument("--tokenizer-model", help="a tokenizer.json, or its folder")
    parser.add_argument("--vocab-size", type=int, help="for NullTokenizer")
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB",
        help="train a byte-level BPE of this size on the input; saved as PREFIX.tokenizer.json",
    )
    args = parser.parse_args(argv)
    model = args.tokenizer_model
    try:
        if args.train_tokenizer is not None:
            model = f"{args.output_prefix}.tokenizer.json"
            texts = read_documents(args.input, args.json_key)
            train_tokenizer(texts, args.train_tokenizer, Path(model))
        tokenizer = build_tokenizer(args.tokenizer_type, model, args.vocab_size)
        documents = read_documents(args.input, args.json_key)
        count, tokens = write_dataset(documents, tokenizer, args.tokenizer_type, args.output_prefix)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.output_prefix}: {count} documents, {tokens} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
