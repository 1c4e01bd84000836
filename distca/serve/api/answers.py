"""Answers of the API: tokens of the engine made into OpenAI's objects, whole or as a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from distca.inference.messages import AddRequest, Output
from distca.inference.sampling import TokenLogprobs
from distca.serve.api.engine_client import EngineClient
from distca.serve.api.errors import error_body
from distca.serve.api.metrics import Metrics
from distca.serve.api.model import ApiModel
from distca.serve.api.protocol import Sampled
from distca.serve.api.text import AnswerText

Shape = Literal["chat", "completion"]
_NAMES = {"chat": ("chatcmpl", "chat.completion"), "completion": ("cmpl", "text_completion")}


@dataclass
class Piece:
    """What is new of an answer.

    Attributes:
        index: which answer.
        text: its new text.
        tokens: its new tokens, with their log-probabilities where they are asked for.
        finish: why it has ended; None: it goes on.
    """

    index: int
    text: str
    tokens: list[tuple[int, TokenLogprobs | None]]
    finish: str | None


@dataclass
class _Answer:
    """An answer so far."""

    text: AnswerText
    count: int = 0
    found: int = 0
    offset: int = 0
    last: float = 0.0


@dataclass
class Job:
    """A request that is being answered.

    Args:
        model: model that answers.
        client: engine.
        metrics: numbers of the server.
        body: fields of the request.
        shape: which objects it is answered with.
        submits: sequences, all answers to the first prompt first.
        echoes: text that each answer begins with.

    Attributes:
        id: name of the request.
        numbers: numbers of its sequences.
    """

    model: ApiModel
    client: EngineClient
    metrics: Metrics
    body: Sampled
    shape: Shape
    submits: Sequence[AddRequest]
    echoes: Sequence[str]
    id: str = ""
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{_NAMES[self.shape][0]}-{uuid.uuid4().hex}"
        self._created, self._begin = int(time.time()), time.monotonic()
        tokenizer = self.model.tokenizer.backend_tokenizer
        self._scored = any(each.scored for each in self.submits)
        self._scores: dict[int, list[TokenLogprobs]] = {}
        self._answers = [
            _Answer(AnswerText(tokenizer, self.body.stops, self.body.skip_special_tokens))
            for _ in self.submits
        ]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Answers, and yields what is new; sequences without a reader are aborted."""
        left = set(range(len(self.submits)))
        answering = self.client.answer(self.submits, self.numbers.extend)
        try:
            for index, echo in enumerate(self.echoes):
                if echo and not self._scored:
                    yield Piece(index, echo, [], None)
            async for index, output in answering:
                if index not in left:
                    continue
                if self._scored and not self._answers[index].count:
                    yield self._prompt(index, output)
                piece = self._piece(index, output)
                if piece.finish:
                    left.discard(index)
                    self.metrics.finished.labels(piece.finish).inc()
                    if not output.finish:
                        self.client.abort(output.number)
                yield piece
                if not left:
                    break
        finally:
            await answering.aclose()  # type: ignore[attr-defined]
            for _ in left:
                self.metrics.finished.labels("abort").inc()
            self.metrics.request.observe(time.monotonic() - self._begin)

    def _prompt(self, index: int, output: Output) -> Piece:
        """A prompt with the log-probabilities of its tokens, of which the first has none."""
        tokens, leader = self.submits[index].tokens, index - self.submits[index].choice
        if index == leader:
            self._scores[index] = output.scores
        scores = [None, *self._scores[leader]]
        return Piece(index, self.echoes[index], list(zip(tokens, scores, strict=True)), None)

    def _piece(self, index: int, output: Output) -> Piece:
        """Takes a token."""
        answer, submit = self._answers[index], self.submits[index]
        now = time.monotonic()
        if answer.count:
            self.metrics.per_token.observe(now - answer.last)
        else:
            self.metrics.first_token.observe(now - self._begin)
            self.metrics.prompt_tokens.inc(len(submit.tokens))
        answer.last = now
        answer.count += 1
        answer.found = output.found
        self.metrics.generation_tokens.inc()
        finish: str | None = output.finish
        # A token that ends an answer is no part of its text.
        text = "" if finish == "stop" else answer.text.add(output.token)
        if finish and not answer.text.stopped:
            text += answer.text.end()
        if answer.text.stopped:
            finish = "stop"
        return Piece(index, text, [(output.token, output.logprobs)], finish)

    def usage(self) -> dict[str, Any]:
        """Returns the tokens of the request: of each prompt once, and of all answers."""
        choices = self.body.n or 1
        prompts = sum(len(each.tokens) for each in self.submits[::choices])
        answers = sum(each.count for each in self._answers)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": answers,
            "total_tokens": prompts + answers,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.found for each in self._answers[::choices])
            },
        }

    async def whole(self) -> dict[str, Any]:
        """Answers, and returns the object of all of it."""
        texts = ["" for _ in self.submits]
        tokens: list[list[tuple[int, TokenLogprobs | None]]] = [[] for _ in self.submits]
        reasons: list[str | None] = [None for _ in self.submits]
        async for piece in self.pieces():
            texts[piece.index] += piece.text
            tokens[piece.index] += piece.tokens
            reasons[piece.index] = piece.finish
        choices = []
        for index, text in enumerate(texts):
            choice: dict[str, Any] = {"index": index, "finish_reason": reasons[index]}
            choice["logprobs"] = self._logprobs(index, tokens[index])
            if self.shape == "chat":
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice)
        return {**self._head(chunk=False), "choices": choices, "usage": self.usage()}

    async def stream(self) -> AsyncIterator[str]:
        """Answers, and yields server-sent events."""
        try:
            if self.shape == "chat":
                for index in range(len(self.submits)):
                    yield self._event(index, {"role": "assistant", "content": ""}, None, None)
            async for piece in self.pieces():
                logprobs = self._logprobs(piece.index, piece.tokens)
                if piece.text or logprobs or piece.finish:
                    delta = {"content": piece.text} if piece.text else {}
                    yield self._event(
                        piece.index,
                        delta if self.shape == "chat" else {"content": piece.text},
                        logprobs,
                        piece.finish,
                    )
            if self.body.with_usage:
                last = {**self._head(chunk=True), "choices": [], "usage": self.usage()}
                yield f"data: {json.dumps(last)}\n\n"
        except Exception as error:
            # The status was sent with the first event.
            yield f"data: {json.dumps(error_body(500, str(error)))}\n\n"
            return
        yield "data: [DONE]\n\n"

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = _NAMES[self.shape][1]
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.shape == "chat" else kind,
            "created": self._created,
            "model": self.body.model or self.model.names[0],
        }

    def _event(self, index: int, delta: dict[str, str], logprobs: Any, finish: str | None) -> str:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": logprobs}
        if self.shape == "chat":
            choice["delta"] = delta
        else:
            choice["text"] = delta["content"]
        usage = {"usage": None} if self.body.with_usage else {}
        return f"data: {json.dumps({**self._head(chunk=True), 'choices': [choice], **usage})}\n\n"

    def _logprobs(
        self, index: int, tokens: Sequence[tuple[int, TokenLogprobs | None]]
    ) -> dict[str, Any] | None:
        """Returns log-probabilities as the shape has them; None: they are not asked for."""
        asked = self.submits[index].logprobs
        if asked is None or not tokens:
            return None
        named = [(self._name(token), found) for token, found in tokens]
        if self.shape == "chat":
            content = [
                {
                    **self._named(name, found.token),
                    "top_logprobs": [
                        self._named(self._name(token), value) for token, value in found.top
                    ],
                }
                for name, found in named
                if found is not None
            ]
            return {"content": content, "refusal": None}
        answer = self._answers[index]
        offsets = []
        for name, _ in named:
            offsets.append(answer.offset)
            answer.offset += len(name)
        return {
            "tokens": [name for name, _ in named],
            "token_logprobs": [None if found is None else found.token for _, found in named],
            "top_logprobs": [
                None
                if found is None
                else {self._name(token): value for token, value in found.top} | {name: found.token}
                for name, found in named
            ]
            if asked
            else None,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        return str(
            self.model.tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)
        )

    @staticmethod
    def _named(name: str, value: float) -> dict[str, Any]:
        return {"token": name, "logprob": value, "bytes": list(name.encode())}
