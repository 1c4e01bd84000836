"""The model that a server answers with, as the API process knows it: its text and its limits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distca.inference.messages import AddRequest
from distca.inference.sampling import Penalties, SamplingParams
from distca.serve.api.errors import ApiError
from distca.serve.api.protocol import Message, Sampled


@dataclass(frozen=True)
class ApiModel:
    """A model's name, tokenizer and limits.

    Attributes:
        names: names by which requests may ask for it, of which answers have the first.
        tokenizer: tokenizer of transformers, made by the package tokenizers.
        positions: most tokens of a sequence.
        vocab_size: tokens that there are.
        stops: tokens that end an answer.
        defaults: sampling values of the model's generation config.
        chat_template: template of conversations; None: the model has none.
        seeds: seeds of requests without one.
    """

    names: tuple[str, ...]
    tokenizer: Any
    positions: int
    vocab_size: int
    stops: frozenset[int]
    defaults: dict[str, Any]
    chat_template: str | None
    seeds: random.Random

    def check_name(self, name: str | None) -> None:
        """Refuses a model that is not served.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here: ask for {self.names[0]}",
                "model",
                "model_not_found",
            )

    async def encode(self, text: str, adds_special: bool) -> list[int]:
        """Returns the tokens of a text, made beside the event loop.

        Raises:
            ApiError: 400, the text is none.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400, "the text has halves of surrogate pairs, which are no characters: remove them"
            ) from error
        encoded = await asyncio.to_thread(
            self.tokenizer.encode, text, add_special_tokens=adds_special
        )
        return list(encoded)

    async def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones among them."""
        decode = self.tokenizer.backend_tokenizer.decode
        return str(await asyncio.to_thread(decode, list(tokens), skip_special_tokens=False))

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Returns the tokens of a conversation as the model's template writes it.

        Raises:
            ApiError: 400, there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ApiError(
                400,
                f"{self.names[0]} has no chat template: ask for /v1/completions, or start the "
                "server with --chat-template",
                "messages",
            )
        plain = [{"role": each.role, "content": each.text} for each in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                plain,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:
            raise ApiError(
                400, f"the chat template refuses the messages: {error}", "messages"
            ) from error
        return await self.encode(text, adds_special=False)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Refuses a prompt that the model cannot be fed.

        Raises:
            ApiError: 400.
        """
        if not tokens:
            raise ApiError(400, "the prompt is empty: give at least one token", param)
        self.check_vocabulary(tokens, param)
        if len(tokens) >= self.positions:
            raise ApiError(
                400,
                f"the prompt has {len(tokens):,} tokens, and a sequence has at most "
                f"{self.positions:,}, answers included: shorten it",
                param,
                "context_length_exceeded",
            )

    def check_vocabulary(self, tokens: Sequence[int], param: str) -> None:
        """Refuses tokens that there are not.

        Raises:
            ApiError: 400.
        """
        outside = next((each for each in tokens if not 0 <= each < self.vocab_size), None)
        if outside is not None:
            raise ApiError(
                400,
                f"there is no token {outside}: the vocabulary has {self.vocab_size:,} tokens",
                param,
            )

    def submits(
        self,
        body: Sampled,
        prompt: Sequence[int],
        most: int | None,
        logprobs: int | None,
        scored: bool = False,
    ) -> list[AddRequest]:
        """Makes the sequences of all answers to a prompt.

        Args:
            body: fields of the request.
            prompt: tokens of the prompt.
            most: most tokens of an answer; None: the model's default, or as many as there can be.
            logprobs: likeliest tokens that are told with each token; None: none at all.
            scored: whether log-probabilities of the prompt's tokens are told as well.

        Raises:
            ApiError: 400, the values don't go together.
        """
        room = self.positions - len(prompt)
        most = most or self.defaults.get("max_new_tokens") or room
        if most > room:
            raise ApiError(
                400,
                f"the prompt has {len(prompt):,} tokens, which with {most:,} new ones are more "
                f"than a sequence's {self.positions:,}: ask for fewer",
                "max_tokens",
                "context_length_exceeded",
            )
        if body.min_tokens > most:
            raise ApiError(
                400, f"min_tokens {body.min_tokens} is more than the {most} tokens allowed"
            )
        stops = frozenset(body.stop_token_ids or ())
        if stops:
            self.check_vocabulary(sorted(stops), "stop_token_ids")
        if not body.ignore_eos:
            stops |= self.stops
        top_k = self._value("top_k", body.top_k, 0)
        sampling = SamplingParams(
            max_tokens=most,
            temperature=float(self._value("temperature", body.temperature, 1.0)),
            seed=self.seeds.getrandbits(62) if body.seed is None else body.seed,
            stops=stops,
            # A message cannot hold any number.
            top_k=min(max(int(top_k), 0), self.vocab_size),
            top_p=float(self._value("top_p", body.top_p, 1.0)),
            min_p=float(self._value("min_p", body.min_p, 0.0)),
        )
        penalties = Penalties(
            presence=body.presence_penalty or 0.0,
            frequency=body.frequency_penalty or 0.0,
            repetition=float(self._value("repetition_penalty", body.repetition_penalty, 1.0)),
            bias=self._bias(body),
            fewest=body.min_tokens,
            # Without a fewest number they change nothing, and what changes nothing is left out.
            stops=frozenset()
            if not body.min_tokens
            else frozenset(each for each in stops if each < self.vocab_size),
        )
        tokens = list(prompt)
        return [
            AddRequest(
                -1, choice, tokens, sampling, penalties, logprobs, scored=scored and not choice
            )
            for choice in range(body.n or 1)
        ]

    def _value(self, name: str, given: float | None, default: float) -> float:
        """A request's value, else the model's own, else OpenAI's."""
        if given is not None:
            return given
        value = self.defaults.get(name)
        return default if value is None else value

    def _bias(self, body: Sampled) -> tuple[tuple[int, float], ...]:
        bias = []
        for name, value in (body.logit_bias or {}).items():
            if not name.isdecimal() or int(name) >= self.vocab_size:
                raise ApiError(400, f"logit_bias: there is no token {name!r}", "logit_bias")
            bias.append((int(name), value))
        return tuple(bias)
