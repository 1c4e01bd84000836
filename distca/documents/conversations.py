"""Conversations in JSON lines, as Megatron-LM's SFT data: each is a document with weights.

A line holds an object with `messages`, each with a role and a content. A system message begins a
new conversation, so that a line may hold several, of which none sees another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.documents.chat import ChatTokenizer, Message
from distca.documents.document_list import TokenSource
from distca.plan.span import Floats, Int64s


@dataclass(frozen=True)
class Conversations(TokenSource):
    """The conversations of a file, in memory.

    Attributes:
        path: file of JSON lines.
        lines: line of each conversation, int64 `[conversations]`.
        edges: first token of each conversation, and the number of all, int64 `[conversations + 1]`.
        tokens: all tokens, int32 `[tokens]`.
        counts: whether each counts in the loss, bool `[tokens]`.
    """

    path: str
    lines: Int64s
    edges: Int64s
    tokens: np.ndarray
    counts: np.ndarray

    @property
    def lengths(self) -> Int64s:
        return np.diff(self.edges)

    def read(self, document: int, start: int, end: int) -> Int64s:
        origin = self.edges[document]
        return self.tokens[origin + start : origin + end].astype(np.int64)

    def loss_weights(self, document: int, start: int, end: int) -> Floats:
        origin = self.edges[document]
        return self.counts[origin + start : origin + end].astype(np.float64)

    def place(self, document: int) -> str:
        return f"{self.path}, line {self.lines[document]}: a conversation"


def read_conversations(path: str, tokenizer: ChatTokenizer) -> Conversations:
    """Reads and tokenizes all conversations of a file.

    Args:
        path: file of JSON lines.
        tokenizer: tokenizer of conversations.

    Raises:
        ValueError: there is no such file, a line is not as it must be, or there are none.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist: with --sft data are files of JSON lines")
    lines, tokens, counts = [], [], []
    edges = [0]
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                for conversation in _split(_messages(line)):
                    found, counted = tokenizer.tokenize(conversation)
                    lines.append(number)
                    tokens.append(np.array(found, dtype=np.int32))
                    counts.append(np.array(counted, dtype=bool))
                    edges.append(edges[-1] + len(found))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise ValueError(f"{path} holds no conversation")
    return Conversations(
        path,
        np.array(lines, dtype=np.int64),
        np.array(edges, dtype=np.int64),
        np.concatenate(tokens),
        np.concatenate(counts),
    )


def _messages(line: bytes) -> list[Message]:
    """Reads a line's messages, each with a text as its role and as its content."""
    try:
        read = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from error
    messages = read.get("messages") if isinstance(read, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("no JSON object with a list of 'messages'")
    for number, message in enumerate(messages, start=1):
        for key in ("role", "content"):
            text = message.get(key) if isinstance(message, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"message {number} has no text as its {key!r}")
            # JSON may escape one half of a pair that makes a character.
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"message {number} has a lone surrogate, half a character")
    return messages


def _split(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields a line's conversations, which begin at its system messages."""
    starts = [n for n, message in enumerate(messages) if n and message["role"] == "system"]
    for first, last in zip([0, *starts], [*starts, len(messages)], strict=True):
        yield list(messages[first:last])
