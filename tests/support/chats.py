"""Conversations in JSON lines, and a tokenizer of bytes that writes them in all prompt formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.byte_tokenizer import byte_tokenizer

# The answers alone are between the marks.
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
END = "</s>"


def save_tokenizer(folder: Path, template: str | None = MARKED) -> str:
    """Writes a tokenizer of bytes and of the special tokens of Megatron-LM's prompt formats."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    special = [*(f"<SPECIAL_{n}>" for n in (10, 11, 12, 233)), "<unk>", END]
    tokenizer.add_special_tokens({"additional_special_tokens": special, "eos_token": END})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_lines(path: Path, lines: Sequence[Any]) -> str:
    """Writes a file of the `messages` of each line."""
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in lines))
    return str(path)


def some_conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Lines of odd sizes: of one or two conversations, some long, some without any answer."""
    generator = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        line = []
        for _ in range(1 + number % 2):
            line.append(message("system", "be brief"))
            for turn in range(int(generator.integers(1, 4))):
                line.append(message("user", f"question {turn} " * int(generator.integers(1, 4))))
                if number % 5:
                    line.append(message("assistant", "so " * int(generator.integers(1, 9)) + "!"))
        lines.append(line)
    return lines
