"""Prompts and conversations: what is fed to a model, turn by turn, and what it answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distca.inference.finite import naming
from distca.inference.messages import Completion, OnToken, RequestOutput, check_tokens
from distca.inference.models import ServedModel
from distca.inference.rank_processes import RankProcesses
from distca.inference.sampling import SamplingParams
from distca.json_files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


class Prompts:
    """Prompts that are answered together, each once.

    Args:
        model: model that answers.
        prompts: token ids of each.
        max_tokens: most tokens of an answer.

    Raises:
        ValueError: there are none, or one is empty, too long, or has a token that there is not.
    """

    def __init__(
        self, model: ServedModel, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> None:
        if not prompts:
            raise ValueError("there are no prompts: give at least one")
        for number, prompt in enumerate(prompts):
            check_tokens(model, prompt, max_tokens, f"prompt {number}")
        self._prompts = [list(prompt) for prompt in prompts]

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self._prompts]

    def run(
        self, ranks: RankProcesses, sampling: SamplingParams, on_token: OnToken
    ) -> list[RequestOutput]:
        """Answers all prompts; returns the answers in their order.

        Raises:
            ValueError: a prompt has no room, or the model's logits are not finite.
        """
        with naming("prompt"):
            answers = ranks.answer(dict(enumerate(self._prompts)), sampling, on_token)
        return [RequestOutput(prompt, [answers[n]]) for n, prompt in enumerate(self._prompts)]


class Conversations:
    """Conversations whose turns are answered in order, those of one turn together.

    The prefix cache has the keys and values of earlier turns, as far as the chat template writes
    these as before.

    Args:
        model: model that answers.
        tokenizer: tokenizer of the model, with a chat template.
        conversations: messages of each.
        max_tokens: most tokens of an answer.

    Attributes:
        places: number of the conversation, and of the turn in it, of each answer of `run`.
        ended: for each conversation that ended early which turn was not answered, and why.

    Raises:
        ValueError: there is no chat template, or nothing to answer.
    """

    def __init__(
        self,
        model: ServedModel,
        tokenizer: PreTrainedTokenizerBase,
        conversations: Sequence[Sequence[Message]],
        max_tokens: int,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {model.path} has no chat template: give --prompt, or add a "
                "chat_template.jinja to the model's folder"
            )
        self._model, self._tokenizer, self._max_tokens = model, tokenizer, max_tokens
        self._conversations = [list(each) for each in conversations]
        self.places: list[dict[str, int]] = []
        self.ended: dict[int, str] = {}
        if not any(self._turns(each) for each in self._conversations):
            raise ValueError("no conversation ends with a message of the user: nothing to answer")
        for number, messages in enumerate(self._conversations):
            if turns := self._turns(messages):
                # Whatever will be answered, the last prompt is no shorter.
                self._tokens(number, _with_empty_answers(messages, turns))

    def __len__(self) -> int:
        return sum(len(self._turns(each)) for each in self._conversations)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each conversation's first prompt; later ones depend on the answers."""
        return [
            len(self._tokens(number, each[: self._turns(each)[0] + 1]))
            for number, each in enumerate(self._conversations)
            if self._turns(each)
        ]

    @staticmethod
    def _turns(messages: Sequence[Message]) -> list[int]:
        """Numbers of the user's messages that no answer follows."""
        roles = [message["role"] for message in messages] + ["user"]
        return [
            n
            for n, role in enumerate(roles[:-1])
            if role == "user" and roles[n + 1] not in ("assistant", "tool")
        ]

    def run(
        self, ranks: RankProcesses, sampling: SamplingParams, on_token: OnToken
    ) -> list[RequestOutput]:
        """Answers all turns: those of the first conversation come first.

        A conversation ends before a turn that has no room; its earlier answers are returned.

        Raises:
            ValueError: the model's logits are not finite.
        """
        done: list[list[RequestOutput]] = [[] for _ in self._conversations]
        said: list[list[Message]] = [[] for _ in self._conversations]
        at = [0] * len(self._conversations)
        while True:
            prompts: dict[int, list[int]] = {}
            for number, messages in enumerate(self._conversations):
                later = [turn for turn in self._turns(messages) if turn >= at[number]]
                if later and number not in self.ended:
                    said[number] += messages[at[number] : later[0] + 1]
                    at[number] = later[0] + 1
                    try:
                        prompts[number] = self._tokens(number, said[number], ranks.capacity)
                    except ValueError as error:
                        turn = f"turn {len(done[number])} of conversation {number}"
                        self.ended[number] = f"{turn} is not answered: {error}"
            if not prompts:
                self.places = [
                    {"conversation": number, "turn": turn}
                    for number, each in enumerate(done)
                    for turn in range(len(each))
                ]
                return [answered for each in done for answered in each]
            with naming("conversation"):
                answers = ranks.answer(prompts, sampling, on_token)
            for number, answer in answers.items():
                done[number].append(RequestOutput(prompts[number], [answer]))
                said[number].append({"role": "assistant", "content": self._text(answer)})

    def _text(self, answer: Completion) -> str:
        return str(self._tokenizer.decode(answer.token_ids, skip_special_tokens=True))

    def _tokens(
        self, number: int, messages: Sequence[Message], capacity: int | None = None
    ) -> list[int]:
        """Token ids of messages as the model's template writes them.

        Raises:
            ValueError: the template refuses them, or they have no room with an answer: not in the
                model's positions, or not in `capacity`, the tokens that all ranks hold.
        """
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(
                f"the chat template of {self._model.path} refuses conversation {number}: {error}"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        check_tokens(self._model, ids, self._max_tokens, f"conversation {number}")
        # The last token of an answer is never fed.
        if capacity is not None and len(ids) + self._max_tokens - 1 > capacity:
            raise ValueError(
                f"conversation {number} has {len(ids):,} tokens, and the ranks have room for "
                f"{capacity:,} with an answer of {self._max_tokens:,}: raise "
                "--kv-cache-memory-bytes or --context-parallel-size, or lower --max-tokens"
            )
        return ids


def _with_empty_answers(messages: Sequence[Message], turns: Sequence[int]) -> list[Message]:
    """Messages to the last turn; those before it are answered by nothing."""
    written: list[Message] = []
    for n, message in enumerate(messages[: turns[-1] + 1]):
        written.append(message)
        if n in turns[:-1]:
            written.append({"role": "assistant", "content": ""})
    return written


def read_prompt_ids(path: Path) -> list[list[int]]:
    """Reads a JSON list of lists of token ids.

    Raises:
        ValueError: the file is something else.
    """
    text = read_text(path, "give a JSON list of lists of token ids", "--prompt-ids")
    try:
        prompts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--prompt-ids {path} is not JSON: {error}") from error
    if not isinstance(prompts, list) or not all(
        isinstance(ids, list) and all(type(each) is int for each in ids) for ids in prompts
    ):
        raise ValueError(f"--prompt-ids {path} is not a list of lists of whole numbers")
    return prompts


def read_conversations(path: Path) -> list[list[Message]]:
    """Reads lists of messages, one in each line.

    Raises:
        ValueError: a line is something else.
    """
    conversations: list[list[Message]] = []
    # Not `splitlines`: a string of JSON may hold other ends of lines than this.
    lines = read_text(path, "give JSON lines of lists of messages", "--conversations").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--conversations {path}:{number} is not JSON: {error}") from error
        if not isinstance(messages, list) or not all(
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
            for each in messages
        ):
            raise ValueError(
                f"--conversations {path}:{number} is not a list of messages with role and content"
            )
        conversations.append(messages)
    return conversations
