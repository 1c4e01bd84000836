"""Conversations in JSON lines, as Megatron-LM's SFT data: each is a document with weights.

A line holds an object with `messages`, each with a role and a content. A system message begins a
new conversation, so that a line may hold several, which do not see each other.

Or it holds a `prompt`, several `completions`, and `weights` if they count differently. Each
completion makes a conversation: the prompt's messages, and then its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from distca.documents.chat import ChatTokenizer, Message
from distca.documents.document_list import TokenSource
from distca.plan.span import Floats, Int64s

logger = logging.getLogger(__name__)

_MOST_WEIGHT = 1e30
"""Weight of a completion at most, so that sums of weights stay finite in float32."""
_KEYS = ("prompt", "completions", "weights")
_NEAR = 0.85
"""How similar a key must be to one of these to be a slip: `weight` is, `prompt_id` is not."""


@dataclass(frozen=True)
class Conversations(TokenSource):
    """The conversations of a file, in memory.

    Attributes:
        path: file of JSON lines.
        lines: line of each conversation, int64 `[conversations]`.
        edges: first token of each conversation, and the number of all, int64 `[conversations + 1]`.
        tokens: all tokens, int32 `[tokens]`.
        counts: whether each counts in the loss, bool `[tokens]`.
        weights: weight of each conversation's tokens that count, float64 `[conversations]`.
    """

    path: str
    lines: Int64s
    edges: Int64s
    tokens: np.ndarray
    counts: np.ndarray
    weights: Floats

    @property
    def lengths(self) -> Int64s:
        return np.diff(self.edges)

    def read(self, document: int, start: int, end: int) -> Int64s:
        origin = self.edges[document]
        return self.tokens[origin + start : origin + end].astype(np.int64)

    def loss_weights(self, document: int, start: int, end: int) -> Floats:
        origin = self.edges[document]
        return self.counts[origin + start : origin + end] * self.weights[document]

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
    lines, tokens, counts, weights = [], [], [], []
    edges, completed = [0], 0
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                for conversation, weight, of_prompt in _conversations(line):
                    completed += of_prompt
                    found, counted = tokenizer.tokenize(conversation)
                    lines.append(number)
                    weights.append(weight)
                    tokens.append(np.array(found, dtype=np.int32))
                    counts.append(np.array(counted, dtype=bool))
                    edges.append(edges[-1] + len(found))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not lines:
        raise ValueError(f"{path} holds no conversation")
    if completed and tokenizer.counts_all:
        logger.warning(
            "%s holds completions, but the prompt format marks no answers: each of %d completions "
            "trains its prompt, too; give a chat template with {%% generation %%}",
            path,
            completed,
        )
    return Conversations(
        path,
        np.array(lines, dtype=np.int64),
        np.array(edges, dtype=np.int64),
        np.concatenate(tokens),
        np.concatenate(counts),
        np.array(weights, dtype=np.float64),
    )


def _conversations(line: bytes) -> Iterator[tuple[list[Message], float, bool]]:
    """Yields the conversations of a line, the weight of each, and whether it is a completion."""
    try:
        read = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})") from error
    if isinstance(read, dict) and "completions" in read:
        for conversation, weight in _completed(read):
            yield conversation, weight, True
        return
    messages = read.get("messages") if isinstance(read, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("no JSON object with a list of 'messages', or 'prompt' and 'completions'")
    _check_messages(messages)
    for conversation in _split(messages):
        yield conversation, 1.0, False


def _completed(read: dict[str, object]) -> Iterator[tuple[list[Message], float]]:
    """Yields a prompt with each of its completions, and the weight of each."""
    for key in read.keys() - set(_KEYS):
        for near in get_close_matches(key.lower(), _KEYS, 1, _NEAR):
            raise ValueError(f"it has the key {key!r}, which is not read: rename it to {near!r}")
    prompt = _as_messages(read.get("prompt"), "user", "'prompt'")
    completions, weights = read["completions"], read.get("weights")
    if "messages" in read:
        raise ValueError("it has both 'messages' and 'completions': give one of the two")
    if not isinstance(completions, list) or not completions:
        raise ValueError("'completions' is not a list of texts, or of lists of messages")
    if weights is None:
        weights = [1.0] * len(completions)
    if not isinstance(weights, list) or len(weights) != len(completions):
        raise ValueError(f"'weights' is not a list of {len(completions)} numbers, one a completion")
    for number, (completion, weight) in enumerate(zip(completions, weights, strict=True), start=1):
        known = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not known or not 0 <= weight <= _MOST_WEIGHT:
            raise ValueError(
                f"weight {number} is {weight!r}: give a number from 0 to {_MOST_WEIGHT:g}"
            )
        yield (
            [*prompt, *_as_messages(completion, "assistant", f"completion {number}")],
            float(weight),
        )


def _as_messages(given: object, role: str, name: str) -> list[Message]:
    """Returns the messages of a prompt or a completion, which may be a text alone."""
    messages = [{"role": role, "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name} is neither a text nor a list of messages")
    try:
        _check_messages(messages)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return messages


def _check_messages(messages: list[object]) -> None:
    """Refuses messages without a text as their role and as their content."""
    for number, message in enumerate(messages, start=1):
        for key in ("role", "content"):
            text = message.get(key) if isinstance(message, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"message {number} has no text as its {key!r}")
            # JSON may escape one half of a pair that makes a character.
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError(f"message {number} has a lone surrogate, half a character")


def _split(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields a line's conversations, which begin at its system messages."""
    starts = [n for n, message in enumerate(messages) if n and message["role"] == "system"]
    for first, last in zip([0, *starts], [*starts, len(messages)], strict=True):
        yield list(messages[first:last])
