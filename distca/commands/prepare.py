"""`distca prepare`: turns text or JSONL into Megatron's indexed token files.

distca prepare --input notes/ more.jsonl --output-prefix corpus --train-tokenizer 32000
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from distca.commands.command_line import HelpFormatter
from distca.documents.dataset import (
    SUFFIXES,
    TOKENIZER_FILES,
    find_files,
    read_documents,
    train_tokenizer,
    write_dataset,
)
from distca.documents.tokenizer import TOKENIZER_TYPES, build_tokenizer


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
    """Runs the command; the arguments are its flags.

    Returns:
        The number of documents and of tokens, document ends included.

    Raises:
        ValueError: a flag contradicts another, or an input or tokenizer cannot be read.
    """
    if workers < 1:
        raise ValueError(f"--workers {workers} must be at least 1")
    other_tokenizer = tokenizer_type != "HuggingFaceTokenizer" or tokenizer_model is not None
    if train_vocab_size is not None and other_tokenizer:
        raise ValueError(
            "--train-tokenizer makes a HuggingFaceTokenizer: give neither another "
            "--tokenizer-type nor a --tokenizer-model"
        )
    if vocab_size is not None and tokenizer_type != "NullTokenizer":
        raise ValueError(f"--vocab-size is for NullTokenizer, not for {tokenizer_type}")
    files = find_files(inputs)
    if train_vocab_size is None and not other_tokenizer:
        raise ValueError(
            "HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json; or let "
            "--train-tokenizer N make one of the input"
        )
    folder = Path(f"{prefix}_tokenizer")
    written = {Path(f"{prefix}{suffix}").resolve() for suffix in SUFFIXES}
    written |= {(folder / name).resolve() for name in TOKENIZER_FILES}
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
    unfinished = prefix.with_name(f".{prefix.name}.unfinished_tokenizer")
    try:
        train_tokenizer(documents("train tokenizer"), train_vocab_size, unfinished)
        tokenizer = build_tokenizer(tokenizer_type, str(unfinished))
        written_now = write_dataset(
            documents("tokenize"), tokenizer, tokenizer_type, prefix, workers=workers
        )
        folder.mkdir(exist_ok=True)
        for name in TOKENIZER_FILES:
            os.replace(unfinished / name, folder / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return written_now


_DESCRIPTION = """\
Turns text into token files that training reads, PREFIX.bin and PREFIX.idx, in Megatron's format.
Each text file is a document, and so is each line of a .jsonl file.
"""
_EXAMPLES = """\
examples:
  distca prepare --input notes/ more.jsonl --output-prefix corpus --train-tokenizer 32000
  distca prepare --input "texts/*.txt" --output-prefix corpus --tokenizer-model llama/

Training then takes --data-path corpus and --tokenizer-model corpus_tokenizer, or llama/.
"""


def build_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="distca prepare",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="Text files, .jsonl files, folders of them, or patterns.",
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="Where a line of .jsonl has its text."
    )
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="What the files are called: PREFIX.bin and PREFIX.idx.",
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        default="HuggingFaceTokenizer",
        help="HuggingFaceTokenizer: a tokenizer.json; ByteLevelTokenizer: a token for each byte; "
        "NullTokenizer: the text is token ids, separated by blanks.",
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="The tokenizer.json of HuggingFaceTokenizer, or the folder that it is in.",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="Number of token ids, for NullTokenizer."
    )
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="N",
        help="Train a tokenizer (byte-level BPE) of N tokens on the input instead of "
        "--tokenizer-model; it is written to the folder PREFIX_tokenizer.",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="Threads. Default: the machine's cores.",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
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
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{args.output_prefix}: {count} documents, {tokens} tokens\n")
    return 0
