"""Tokenizers by Megatron's `--tokenizer-type`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TOKENIZER_TYPES = ("HuggingFaceTokenizer", "NullTokenizer", "ByteLevelTokenizer")


class Tokenizer(Protocol):
    """What data preparation and training need.

    Attributes:
        vocab_size: token ids are below it.
        eod: the token that ends a document.
    """

    vocab_size: int
    eod: int

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class ByteLevelTokenizer:
    """UTF-8 bytes; the token after them ends a document."""

    vocab_size: int = 257
    eod: int = 256

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class NullTokenizer:
    """Text that is token ids already, separated by blanks; one more token ends a document."""

    vocab_size: int
    eod: int

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(str(i) for i in ids)


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or a folder with one, as the `tokenizers` library saves it.

    A document ends with the first of its usual end tokens that the vocabulary has.
    """

    _END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eod|>", "<eod>")

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError("HuggingFaceTokenizer needs `pip install tokenizers`") from error
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        found = [self._tokenizer.token_to_id(token) for token in self._END_TOKENS]
        ends = [i for i in found if i is not None]
        if not ends:
            raise ValueError(
                f"{path} has no token that ends a document (one of {', '.join(self._END_TOKENS)})"
            )
        self.eod: int = ends[0]

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def tokenize_many(self, texts: list[str]) -> list[list[int]]:
        """Several texts at once, on all cores."""
        batch = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def detokenize(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer that the flags ask for.

    Args:
        tokenizer_type: one of `TOKENIZER_TYPES`.
        tokenizer_model: for `HuggingFaceTokenizer`: a `tokenizer.json`, or the folder of one.
        vocab_size: for `NullTokenizer`: ids in the text are below it, and the id itself ends a
            document, as in Megatron-LM.

    Raises:
        ValueError: a value is missing or unknown, or the file does not exist.
    """
    if tokenizer_type == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise ValueError("NullTokenizer needs --vocab-size, the number of token ids")
        return NullTokenizer(vocab_size + 1, vocab_size)
    if tokenizer_type == "HuggingFaceTokenizer":
        if tokenizer_model is None:
            raise ValueError("HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json")
        path = Path(tokenizer_model)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"--tokenizer-model {path} does not exist")
        return HuggingFaceTokenizer(path)
    raise ValueError(f"--tokenizer-type {tokenizer_type}: choose from {', '.join(TOKENIZER_TYPES)}")
