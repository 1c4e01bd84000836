"""Conversations as tokens, and which of them count: as Megatron-LM's `SFTTokenizer` has it.

A prompt format of Megatron-LM's says how a message is written. `default` takes the tokenizer's own
chat template instead.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class _Format:
    """A prompt format, in which each message is written by itself.

    Attributes:
        writers: by role, what writes the text of a message; roles without one are left out.
        skipped: first tokens of an answer that don't count, since a prompt gives them.
        padding: token of whose id none counts.
        counts_answers: whether answers alone count; else all tokens do.
    """

    writers: Mapping[str, Callable[[str], str]]
    skipped: int
    padding: str
    counts_answers: bool = True

    def written(self, message: Message) -> str:
        """Returns the text of a message."""
        writer = self.writers.get(message["role"], self.writers.get("*"))
        return "" if writer is None else writer(message["content"])


def _without_switches(content: str) -> str:
    """Returns a content without the words that turn thinking on and off."""
    return content.replace("/think", "").replace("/no_think", "").strip()


_FORMATS = {
    "nemotron-h-aligned": _Format(
        {
            "system": lambda content: f"<SPECIAL_10>System\n{content.strip()}\n",
            "user": lambda content: f"<SPECIAL_11>User\n{content.strip()}\n<SPECIAL_11>Assistant\n",
            "assistant": lambda content: f"{content.strip()}\n",
        },
        skipped=0,
        padding="<SPECIAL_233>",
    ),
    "nemotron-nano-v2": _Format(
        {
            "system": lambda content: f"<SPECIAL_10>System\n{_without_switches(content)}\n",
            "user": lambda content: f"<SPECIAL_11>User\n{_without_switches(content)}\n",
            "assistant": lambda content: (
                f"<SPECIAL_11>Assistant\n{content.strip()}\n<SPECIAL_12>\n"
            ),
        },
        skipped=3,
        padding="<unk>",
    ),
    "identity": _Format(
        {"*": lambda content: content}, skipped=0, padding="<unk>", counts_answers=False
    ),
}
PROMPT_FORMATS = (*_FORMATS, "default")
"""Values of `--sft-tokenizer-prompt-format`."""


class ChatTokenizer:
    """A tokenizer of conversations, from the folder of a Hugging Face tokenizer.

    Args:
        folder: folder with `tokenizer.json` and `tokenizer_config.json`.
        prompt_format: one of `PROMPT_FORMATS`.
        ends: whether an end token is added to a conversation that has none.

    Attributes:
        vocab_size: bound of the token ids.
        eod: token that ends a document, or None.
        counts_all: whether all tokens count in the loss, those of prompts too.

    Raises:
        ValueError: there is no such folder or format, no chat template, or no end token.
        ImportError: transformers is missing.
    """

    def __init__(self, folder: str, prompt_format: str, ends: bool) -> None:
        if prompt_format not in PROMPT_FORMATS:
            raise ValueError(
                f"--sft-tokenizer-prompt-format {prompt_format}: choose from "
                f"{', '.join(PROMPT_FORMATS)}"
            )
        if not Path(folder).is_dir():
            raise ValueError(f"--tokenizer-model {folder} is not a folder of a tokenizer")
        try:
            import transformers
        except ImportError as error:
            raise ImportError("SFTTokenizer needs `pip install transformers`") from error
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # The library raises nothing narrower.
            raise ValueError(f"--tokenizer-model {folder} cannot be read: {error}") from error
        self.vocab_size: int = len(self._tokenizer)
        self.eod: int | None = self._tokenizer.eos_token_id
        self._format, self._ends = _FORMATS.get(prompt_format), ends
        if ends and self.eod is None:
            raise ValueError(
                f"{folder} has no token that ends a conversation: give eos_token in its "
                "tokenizer_config.json"
            )
        if self._format is not None:
            self.counts_all = not self._format.counts_answers
            self._padding = self._tokenizer.convert_tokens_to_ids(self._format.padding)
            return
        padding = self._tokenizer.pad_token_id
        self._padding = self.eod if padding is None else padding
        template = self._tokenizer.chat_template
        if template is None:
            raise ValueError(
                f"{folder} has no chat template, which --sft-tokenizer-prompt-format default "
                f"needs: give one, or choose from {', '.join(_FORMATS)}"
            )
        self.counts_all = _MARKS_ANSWERS.search(str(template)) is None
        if self.counts_all:
            logger.warning(
                "the chat template of %s does not mark answers ({%% generation %%}): all tokens "
                "count in the loss, as in Megatron-LM",
                folder,
            )

    def tokenize(self, conversation: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a conversation, and whether each counts in the loss.

        Args:
            conversation: messages, each with a role and a content.

        Raises:
            ValueError: the format doesn't take these messages.
        """
        if self._format is None:
            tokens, counts = self._by_template(conversation)
        else:
            tokens, counts = self._by_format(self._format, conversation)
        if not tokens:
            raise ValueError("the prompt format writes nothing")
        if self._ends and tokens[-1] != self.eod:
            assert self.eod is not None
            tokens, counts = [*tokens, self.eod], [*counts, True]
        return tokens, [
            count and token != self._padding for token, count in zip(tokens, counts, strict=True)
        ]

    def _by_template(self, conversation: Sequence[Message]) -> tuple[list[int], list[bool]]:
        try:
            found = self._tokenizer.apply_chat_template(
                list(conversation),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=not self.counts_all,
            )
        except Exception as error:  # Templates raise what they like.
            raise ValueError(f"the chat template refuses it: {error}") from error
        tokens = list(found["input_ids"])
        if self.counts_all:
            return tokens, [True] * len(tokens)
        return tokens, [bool(each) for each in found["assistant_masks"]]

    def _by_format(
        self, form: _Format, conversation: Sequence[Message]
    ) -> tuple[list[int], list[bool]]:
        turns = [form.written(message) for message in conversation]
        whole, *parts = self._tokenizer(["".join(turns), *turns], add_special_tokens=False)[
            "input_ids"
        ]
        if not form.counts_answers:
            return whole, [True] * len(whole)
        counts: list[bool] = []
        before = None
        for message, part in zip(conversation, parts, strict=True):
            role = message["role"]
            if role == "assistant":
                if not message["content"]:
                    raise ValueError("an assistant's message is empty")
                if before not in ("user", "tool"):
                    raise ValueError("an assistant's message does not follow a user's")
            elif role not in ("system", "user", "tool"):
                raise ValueError(f"the role {role!r} is none of system, user, tool, assistant")
            counts += [role == "assistant" and n >= form.skipped for n in range(len(part))]
            before = role
        if [token for part in parts for token in part] != whole:
            raise ValueError(
                "its messages are other tokens together than one by one, so that it is not clear "
                "which count: use a tokenizer that has the format's special tokens"
            )
        return whole, counts
