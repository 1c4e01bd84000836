"""Conversion of text to Megatron's indexed token files, a sequence a document, without Megatron."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from distca.documents.index import IndexedWriter
from distca.documents.tokenizer import Tokenizer

_DOCUMENTS_PER_WORKER = 64
"""Documents that a worker is given at a time; memory holds as many texts for each worker."""

SUFFIXES = (".bin", ".json", ".idx")
"""Suffixes of a dataset's files, in the order in which they are written: the index comes last."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""Files of a tokenizer's folder. `transformers`, and so Megatron-LM's loop, wants both."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Trains a byte-level BPE tokenizer on texts and saves it as the `TOKENIZER_FILES` of a folder.

    Raises:
        ValueError: the vocabulary has no room for the 256 bytes and the end token.
    """
    if vocab_size < 257:
        raise ValueError(f"a byte-level vocabulary needs at least 257 tokens, not {vocab_size}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    folder.mkdir(parents=True, exist_ok=True)
    model, config = (folder / name for name in TOKENIZER_FILES)
    tokenizer.save(str(model))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    config.write_text(json.dumps(described, indent=2) + "\n")


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
        documents: texts of the documents; empty ones are left out.
        tokenizer: tokenizer whose `eod` token ends each document.
        tokenizer_type: type of the tokenizer, noted in the `.json`.
        prefix: path of the files, without suffix.
        workers: threads that tokenize.
        source: description of the texts, noted in the `.json`.

    Returns:
        The number of documents and of tokens, document ends included.

    Raises:
        ValueError: no document has any text.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    unfinished = prefix.with_name(f".{prefix.name}.unfinished")
    try:
        with IndexedWriter(Path(f"{unfinished}.bin"), tokenizer.vocab_size) as writer:
            for ids in _tokenize(documents, tokenizer, workers):
                writer.add_document([*ids, tokenizer.eod])
        if not writer.lengths:
            raise ValueError("the input holds no text")
        writer.write_index(Path(f"{unfinished}.idx"))
        count, tokens = len(writer.lengths), sum(writer.lengths)
        description = {
            "tokenizer_type": tokenizer_type,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            "documents": count,
            "tokens": tokens,
            "source": source,
        }
        Path(f"{unfinished}.json").write_text(json.dumps(description, indent=2) + "\n")
        # An older dataset loses its index first, so that no index ever lies beside other tokens.
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        for suffix in SUFFIXES:
            os.replace(f"{unfinished}{suffix}", f"{prefix}{suffix}")
    finally:
        for suffix in SUFFIXES:
            Path(f"{unfinished}{suffix}").unlink(missing_ok=True)
    return count, tokens


def _tokenize(documents: Iterable[str], tokenizer: Tokenizer, workers: int) -> Iterator[list[int]]:
    """Yields the token ids of each document that has any, in order."""
    remaining = iter(documents)
    with ThreadPoolExecutor(workers) as pool:
        while batch := list(itertools.islice(remaining, _DOCUMENTS_PER_WORKER * workers)):
            yield from (ids for ids in pool.map(tokenizer.tokenize, batch) if ids)
