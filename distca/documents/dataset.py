"""Conversion of text to Megatron's indexed token files, a sequence a document, without Megatron."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from distca.documents.index import IndexedWriter
from distca.documents.tokenizer import Tokenizer
from distca.whole_file import write_text

logger = logging.getLogger(__name__)

_DOCUMENTS_PER_WORKER = 64
"""Documents that a worker is given at a time; memory holds as many texts for each worker."""

SUFFIXES = (".bin", ".json", ".idx")
"""Suffixes of a dataset's files, in the order in which they are written: the index comes last."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""Files of a tokenizer's folder. `transformers`, and so Megatron-LM's loop, wants both."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> int:
    """Trains a byte-level BPE tokenizer on texts and saves it as the `TOKENIZER_FILES` of a folder.

    Returns:
        Entries of its vocabulary: fewer than `vocab_size` if the texts have no more pairs to merge.

    Raises:
        ValueError: the vocabulary has no room for the 256 bytes and the end token.
    """
    if vocab_size < 257:
        raise ValueError(f"a byte-level vocabulary needs at least 257 tokens, not {vocab_size}")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError("--train-tokenizer needs `pip install tokenizers`") from error

    end = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    model, config = (folder / name for name in TOKENIZER_FILES)
    write_text(model, tokenizer.to_str(pretty=True))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    write_text(config, json.dumps(described, indent=2) + "\n")
    return int(tokenizer.get_vocab_size())


@contextlib.contextmanager
def sole_writer(prefix: Path) -> Iterator[Path]:
    """Keeps other processes from writing files of a name, and yields a folder for unfinished ones.

    The folder is new, and lies beside the files, so that they can be renamed. It is removed at the
    end, as is the file that is locked. The kernel releases the lock of a process that is killed,
    and the next writer removes its folder.

    Args:
        prefix: path of the files, without suffix.

    Raises:
        ValueError: another process writes files of that name.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    path = prefix.with_name(f".{prefix.name}.lock")
    start = f".{prefix.name}.unfinished-"
    file, locked = _lock(path)
    try:
        if locked:
            for left in prefix.parent.glob(f"{glob.escape(start)}*"):
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=start, dir=prefix.parent) as folder:
            yield Path(folder)
    finally:
        # While it is locked: a process that opened it before then sees that it is gone.
        path.unlink(missing_ok=True)
        file.close()


def _lock(path: Path) -> tuple[IO[str], bool]:
    """Opens and locks a file; returns it, and whether its file system has locks."""
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ValueError(
                f"another process writes {path.parent / path.name[1:].removesuffix('.lock')}: "
                "wait until it ends, or choose another name"
            ) from error
        except OSError as error:
            logger.warning(
                "%s: the file system has no locks (%s): let no other process write there",
                path.parent,
                error.strerror,
            )
            return file, False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, True
        # The process that had the lock removed this file: others lock a new one.
        file.close()


def write_dataset(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    tokenizer_type: str,
    prefix: Path,
    unfinished: Path,
    *,
    workers: int = 1,
    source: str = "",
) -> tuple[int, int]:
    """Writes `prefix.bin`, `.idx` and `.json`; an interrupted run leaves no partial dataset.

    Args:
        documents: texts of the documents; empty ones are left out.
        tokenizer: tokenizer whose `eod` token ends each document.
        tokenizer_type: type of the tokenizer, noted in the `.json`.
        prefix: path of the files, without suffix.
        unfinished: folder for unfinished files, which `sole_writer` yields for the prefix.
        workers: threads that tokenize.
        source: description of the texts, noted in the `.json`.

    Returns:
        The number of documents and of tokens, document ends included.

    Raises:
        ValueError: no document has any text.
    """
    new = unfinished / prefix.name
    with IndexedWriter(Path(f"{new}.bin"), tokenizer.vocab_size) as writer:
        for ids in _tokenize(documents, tokenizer, workers):
            writer.add_document([*ids, tokenizer.eod])
    if not writer.lengths:
        raise ValueError("the input holds no text")
    writer.write_index(Path(f"{new}.idx"))
    count, tokens = len(writer.lengths), sum(writer.lengths)
    description = {
        "tokenizer_type": tokenizer_type,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "documents": count,
        "tokens": tokens,
        "source": source,
    }
    Path(f"{new}.json").write_text(json.dumps(description, indent=2) + "\n")
    # An older dataset loses its index first, so that no index ever lies beside other tokens.
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    for suffix in SUFFIXES:
        os.replace(f"{new}{suffix}", f"{prefix}{suffix}")
    return count, tokens


def _tokenize(documents: Iterable[str], tokenizer: Tokenizer, workers: int) -> Iterator[list[int]]:
    """Yields the token ids of each document that has any, in order."""
    remaining = iter(documents)
    with ThreadPoolExecutor(workers) as pool:
        while batch := list(itertools.islice(remaining, _DOCUMENTS_PER_WORKER * workers)):
            yield from (ids for ids in pool.map(tokenizer.tokenize, batch) if ids)
