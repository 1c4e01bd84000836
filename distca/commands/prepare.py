"""`distca prepare`: turns text or JSONL into Megatron's indexed token files.

distca prepare --input notes/ more.jsonl --output-prefix corpus --train-tokenizer 32000
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from distca.commands.command_line import Parser, check_output
from distca.documents.dataset import (
    SUFFIXES,
    TOKENIZER_FILES,
    sole_writer,
    train_tokenizer,
    write_dataset,
)
from distca.documents.index import LARGEST_TOKEN
from distca.documents.texts import find_files, read_documents
from distca.documents.tokenizer import TOKENIZER_TYPES, build_tokenizer
from distca.progress import Progress, progress
from distca.whole_file import write_text
from distca.wording import counted

_SHOWN = 2
"""Faults that are shown; all are written to a file."""


_FEW_DOCUMENTS = 20
"""With fewer documents, shares such as 90,5,5 may leave a split empty."""
_MOST_TRAINED_TOKENS = 1 << 24
"""Largest vocabulary to train: its tables are made before any text is read."""


def prepare(args: Namespace) -> str:
    """Runs the command; returns its summary.

    Raises:
        ValueError: a flag contradicts another, an input or tokenizer cannot be read, or files
            would be replaced without `--force`.
    """
    prefix: Path = args.output_prefix
    files = find_files(args.input)
    _check_flags(args)
    folder, left_out = Path(f"{prefix}_tokenizer"), Path(f"{prefix}_left_out.txt")
    written = [Path(f"{prefix}{suffix}") for suffix in SUFFIXES]
    if args.train_tokenizer is not None:
        written += [folder / name for name in TOKENIZER_FILES]
    overwritten = {file.resolve() for file in files} & {
        file.resolve() for file in (*written, left_out)
    }
    if overwritten:
        raise ValueError(
            f"--input {min(overwritten)} would be overwritten: give another --output-prefix"
        )
    check_output("--output-prefix", left_out)
    replaced = [file for file in written if file.exists()]
    if replaced and not args.force:
        raise ValueError(
            f"{replaced[0]} exists: give --force to replace it, or another --output-prefix"
        )
    reader = _Reader(files, args.json_key, args.bad_text == "refuse")

    with _naming(prefix), sole_writer(prefix) as unfinished:
        model, trained = args.tokenizer_model, unfinished / "tokenizer"
        if args.train_tokenizer is not None:
            with reader.showing("train tokenizer") as shown:
                entries = train_tokenizer(reader.documents(shown), args.train_tokenizer, trained)
            model = str(trained)
            if entries < args.train_tokenizer:
                sys.stderr.write(
                    f"distca prepare: the tokenizer has {entries:,} entries instead of "
                    f"{args.train_tokenizer:,}, as the text has no more pairs of tokens to merge; "
                    "training reads the number from the tokenizer, so no flag changes\n"
                )
        tokenizer = build_tokenizer(args.tokenizer_type, model, args.vocab_size)
        try:
            with reader.showing("tokenize") as shown:
                count, tokens = write_dataset(
                    reader.documents(shown),
                    tokenizer,
                    args.tokenizer_type,
                    prefix,
                    unfinished,
                    workers=args.workers,
                )
        finally:
            reader.tell(left_out)
        if args.train_tokenizer is not None:
            folder.mkdir(exist_ok=True)
            for name in TOKENIZER_FILES:
                os.replace(trained / name, folder / name)
    rest = f"; left out: {len(reader.faults)}" if reader.faults else ""
    if count < _FEW_DOCUMENTS:
        rest += "; --split may leave a part of so few documents empty: 1,0,0 trains on all"
    if replaced:
        rest += "; the files of an earlier run were replaced"
    return f"{prefix}: {counted(count, 'document')}, {counted(tokens, 'token')}{rest}"


def _check_flags(args: Namespace) -> None:
    if args.workers < 1:
        raise ValueError(f"--workers {args.workers} must be at least 1")
    other = args.tokenizer_type != "HuggingFaceTokenizer" or args.tokenizer_model is not None
    if args.train_tokenizer is not None and other:
        raise ValueError(
            "--train-tokenizer makes a HuggingFaceTokenizer: give neither another "
            "--tokenizer-type nor a --tokenizer-model"
        )
    if args.train_tokenizer is not None and args.train_tokenizer > _MOST_TRAINED_TOKENS:
        raise ValueError(
            f"--train-tokenizer {args.train_tokenizer}: give at most {_MOST_TRAINED_TOKENS} tokens"
        )
    if args.train_tokenizer is None and not other:
        raise ValueError(
            "HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json; or let "
            "--train-tokenizer N make one of the input"
        )
    if args.vocab_size is not None and args.tokenizer_type != "NullTokenizer":
        raise ValueError(f"--vocab-size is for NullTokenizer, not for {args.tokenizer_type}")
    if args.vocab_size is not None and args.vocab_size > LARGEST_TOKEN:
        raise ValueError(
            f"--vocab-size {args.vocab_size}: a token file has 32 bits for an id, so give at most "
            f"{LARGEST_TOKEN}"
        )
    if args.tokenizer_model is not None and args.tokenizer_type != "HuggingFaceTokenizer":
        raise ValueError(
            f"--tokenizer-model is for HuggingFaceTokenizer, not for {args.tokenizer_type}"
        )
    if not args.output_prefix.name:
        raise ValueError(f"--output-prefix {args.output_prefix} is a folder: add a name of files")


class _Reader:
    """A reader of the input, as often as it is needed.

    Args:
        files: files to read.
        json_key: key of the text in a line of `.jsonl`.
        refuse: whether what is not UTF-8 text is an error; else it is left out.

    Attributes:
        faults: place and fault of what the last reading left out.
    """

    def __init__(self, files: Sequence[Path], json_key: str, refuse: bool) -> None:
        self._files, self._json_key, self._refuse = files, json_key, refuse
        self.faults: list[str] = []

    def showing(self, doing: str) -> AbstractContextManager[Progress]:
        """Shows progress while the files are read."""
        size = sum(file.stat().st_size for file in self._files)
        return progress("distca prepare", "bytes", size, doing=doing, scaled=True)

    def documents(self, shown: Progress) -> Iterator[str]:
        """Yields all texts, and counts their bytes."""
        self.faults.clear()
        yield from read_documents(self._files, self._json_key, self._leave_out, shown.update)

    def _leave_out(self, fault: str) -> None:
        if self._refuse:
            raise ValueError(f"{fault}; --bad-text skip leaves such documents out")
        self.faults.append(fault)

    def tell(self, path: Path) -> None:
        """Writes to a file what was left out, and shows the first."""
        if not self.faults:
            path.unlink(missing_ok=True)
            return
        listed = "".join(f"{fault}\n" for fault in self.faults)
        # Names of files may be no UTF-8 either.
        write_text(path, listed, errors="backslashreplace")
        shown = [*self.faults[:_SHOWN], *["..."][: len(self.faults) - _SHOWN]]
        sys.stderr.write(
            f"distca prepare: left out {len(self.faults)} that are not UTF-8 text, see {path}:\n"
            + "".join(f"  {line}\n" for line in shown)
        )


@contextmanager
def _naming(prefix: Path) -> Iterator[None]:
    """Names the files in the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"{prefix}.bin cannot be written: {error.strerror}") from error


_DESCRIPTION = """\
Turns text into token files that training reads, PREFIX.bin and PREFIX.idx, in Megatron's format.
Each text file and each line of a .jsonl file is a document.
"""
_EXAMPLES = """\
examples:
  distca prepare --input notes/ more.jsonl --output-prefix corpus --train-tokenizer 32000
  distca prepare --input "texts/*.txt" --output-prefix corpus --tokenizer-model llama/

Training then takes --data-path corpus and --tokenizer-model corpus_tokenizer, or llama/.
"""


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("prepare", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="Text files, .jsonl files, folders with such files, or patterns of file names.",
    )
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="Key of the text in each line of a .jsonl file.",
    )
    parser.add_argument(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="Prefix of the output files PREFIX.bin and PREFIX.idx.",
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        default="HuggingFaceTokenizer",
        help="HuggingFaceTokenizer: a tokenizer.json; NullTokenizer: the text is token ids, "
        "separated by blanks; ByteLevelTokenizer: each byte is a token. For a corpus of "
        "ByteLevelTokenizer, train with NullTokenizer and --vocab-size 257 (256 before "
        "megatron-core 0.18).",
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="For HuggingFaceTokenizer: a tokenizer.json, or its folder.",
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="For NullTokenizer: number of token ids."
    )
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="N",
        help="Train a byte-level BPE tokenizer of N tokens on the input, instead of using "
        "--tokenizer-model. It is written to the folder PREFIX_tokenizer.",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="Replace the files of an earlier run. Without this flag they are an error.",
    )
    parser.add_argument(
        "--bad-text",
        choices=("skip", "refuse"),
        default="skip",
        help="What to do with documents that are not UTF-8 text. skip: leave them out and list "
        "them in PREFIX_left_out.txt; refuse: end with an error at the first one.",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="Number of threads. Default: the number of the machine's cores.",
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    sys.stdout.write(prepare(build_parser().parse(argv)) + "\n")
    return 0
