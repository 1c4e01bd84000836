"""Tokenizers by Megatron's `--tokenizer-type`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TOKENIZER_TYPES = ("HuggingFaceTokenizer", "NullTokenizer", "ByteLevelTokenizer")


class Tokenizer(Protocol):
    """The interface of a tokenizer, as data preparation and training need it.

    Attributes:
        vocab_size: bound of the token ids.
        eod: token that ends a document.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class ByteLevelTokenizer:
    """A tokenizer whose tokens are UTF-8 bytes, and one more that ends a document."""

    vocab_size: int = 257
    eod: int = 256

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class NullTokenizer:
    """A tokenizer of texts that are token ids, separated by blanks; one more ends a document."""

    vocab_size: int
    eod: int

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(
                f"NullTokenizer takes token ids separated by blanks, not {text[:40]!r}"
            ) from error
        if ids and not (min(ids) >= 0 and max(ids) < self.eod):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"token id {wrong} in the text is not below --vocab-size {self.eod}")
        return ids

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(str(i) for i in ids)


class HuggingFaceTokenizer:
    """A tokenizer that the `tokenizers` library saved as `tokenizer.json`.

    A document ends with the `eos_token` of the `tokenizer_config.json` beside it; without one, with
    the first of the usual end tokens that the vocabulary has.

    Raises:
        ValueError: the file cannot be read, or has no token that ends a document.
    """

    _END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eod|>", "<eod>")

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError("HuggingFaceTokenizer needs `pip install tokenizers`") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error
        # Ids may have gaps.
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        named = _eos_token(path.with_name("tokenizer_config.json"))
        names = self._END_TOKENS if named is None else (named,)
        ends = [i for i in map(self._tokenizer.token_to_id, names) if i is not None]
        if not ends:
            raise ValueError(
                f"{path} has no token that ends a document ({', '.join(names)}): add one with "
                "transformers' add_special_tokens"
            )
        self.eod: int = ends[0]

    def tokenize(self, text: str) -> list[int]:
        # A batch of one text, since encoding a single text blocks Python's other threads.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def detokenize(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _eos_token(config: Path) -> str | None:
    """Returns the end token that a `tokenizer_config.json` names, if any."""
    if not config.is_file():
        return None
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{config} cannot be read: it is no object of JSON, {{...}}")
    eos = settings.get("eos_token")
    return eos["content"] if isinstance(eos, dict) else eos


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """Makes the tokenizer that the flags ask for.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        tokenizer_model: path of a `tokenizer.json` or its folder, for `HuggingFaceTokenizer`.
        vocab_size: bound of the ids in the text, for `NullTokenizer`; as an id it ends a document,
            as in Megatron-LM.

    Raises:
        ValueError: a value is missing or unknown, or the file is missing or no tokenizer.
    """
    if tokenizer_type == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise ValueError(
                "NullTokenizer needs --vocab-size, the number of token ids, at least 1"
            )
        return NullTokenizer(vocab_size + 1, vocab_size)
    if tokenizer_type == "HuggingFaceTokenizer":
        if tokenizer_model is None:
            raise ValueError("HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json")
        path = Path(tokenizer_model)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"--tokenizer-model {path} does not exist: give a tokenizer.json, or its folder"
            )
        return HuggingFaceTokenizer(path)
    raise ValueError(f"--tokenizer-type {tokenizer_type}: choose from {', '.join(TOKENIZER_TYPES)}")
