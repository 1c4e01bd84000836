"""Requests, what an engine and its workers tell each other of them, and answers.

An engine and a worker share a process: what a worker says of an iteration is what is sent, to the
other processes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, SupportsIndex

import torch

from distca.inference.sampling import NO_PENALTIES, Penalties, SamplingParams, TokenLogprobs
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.request import FinishReason, Request
from distca.schedule.serving.scheduled import SchedulerOutput

OnToken = Callable[[int, int], None]
"""Function of a request's number and the token that was chosen for it."""


class Fed(Protocol):
    """A model's bounds of what it can be fed."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        ...

    @property
    def positions(self) -> int:
        """Most tokens of a sequence."""
        ...


def check_tokens(model: Fed, ids: Sequence[int], max_tokens: int, what: str) -> None:
    """Refuses tokens that a model cannot be fed.

    Args:
        model: the model, or its configuration.
        ids: token ids.
        max_tokens: most tokens of the answer.
        what: name of the prompt, for the message.

    Raises:
        ValueError: there are none, or too many, or one is not in the vocabulary.
    """
    if not ids:
        raise ValueError(f"{what} is empty: give at least one token")
    outside = next((each for each in ids if not 0 <= each < model.vocab_size), None)
    if outside is not None:
        raise ValueError(
            f"{what} has the token {outside}, but the vocabulary has {model.vocab_size:,} tokens"
        )
    if len(ids) + max_tokens > model.positions:
        raise ValueError(
            f"{what} has {len(ids):,} tokens, which with {max_tokens:,} new ones are more than the "
            f"model's {model.positions:,} positions: shorten it, or lower --max-tokens"
        )


def whole_numbers(ids: Iterable[SupportsIndex], what: str) -> list[int]:
    """Returns token ids as ints.

    Args:
        ids: token ids: ints, or what stands for them, as the elements of an integer tensor.
        what: name of the prompt, for the message.

    Raises:
        ValueError: one is not a whole number.
    """
    try:
        return [operator.index(each) for each in ids]
    except TypeError:
        raise ValueError(f"{what} has something else than whole numbers: give token ids") from None


@dataclass(frozen=True)
class AddRequest:
    """A sequence to answer, as it is asked for. `Request` is how far it is.

    Attributes:
        number: a number that no other sequence has, by which its tokens are drawn, too.
        tokens: prompt.
        sampling: choice of tokens. One of no `max_tokens` is computed and held for others that read
            its keys and values, until `Engine.abort`.
        penalties: changes of logits.
        logprobs: number of likeliest tokens to return with each token, or None.
        leader: number of the sequence that computes the prompt for this one, too, and that is
            announced after it; None: this one itself.
        scored: whether to return log-probabilities of the prompt's tokens, too.
        priority: sequences of a lower number run before those of a higher one.
        salt: what else keys and values depend on: only sequences of the same salt share blocks.
        arrived: time of the arrival in seconds, which never goes back.
        chain: chain that shares out the prompt, however short it is; None: that of the
            configuration.
        group: ranks that compute all of the prompt, where groups grow; None: they are planned.
    """

    number: int
    tokens: list[int]
    sampling: SamplingParams
    penalties: Penalties = NO_PENALTIES
    logprobs: int | None = None
    leader: int | None = None
    scored: bool = False
    priority: int = 0
    salt: bytes = b""
    arrived: float = 0.0
    chain: Chain | None = None
    group: Ranks | None = None

    @property
    def takes_likeliest(self) -> bool:
        """Whether the unchanged logits decide, and no log-probabilities are asked for."""
        plain = self.logprobs is None and self.sampling.temperature == 0
        # Most requests have the default itself, which need not be compared.
        return plain and (self.penalties is NO_PENALTIES or self.penalties == NO_PENALTIES)


class Admitted(NamedTuple):
    """A sequence that runs or is held: what is asked for, and how far it is."""

    asked: AddRequest
    request: Request


class Output(NamedTuple):
    """A token of an answer.

    Attributes:
        number: number of the sequence.
        token: token that was chosen.
        finish: why the answer has ended; None: it goes on.
        logprobs: log-probabilities of this token, where they are asked for.
        scores: log-probabilities of the prompt's tokens but the first, with the answer's first.
    """

    number: int
    token: int
    finish: FinishReason | None
    logprobs: TokenLogprobs | None = None
    scores: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class Iteration:
    """A numbered iteration. Every worker takes in all of them, in the order of their numbers.

    Attributes:
        number: number of the iteration.
        batch: what is fed, which blocks that adds, and which blocks change their ranks before.
        admitted: sequences that begin to run, or begin again.
        drop: sequences that have ended, or gave up their blocks.
        members: processes that have a part in it.
    """

    number: int
    batch: SchedulerOutput
    admitted: Sequence[Admitted]
    drop: Sequence[int]
    members: Collection[int]


class SampledToken(NamedTuple):
    """A token that was chosen for a sequence.

    Attributes:
        number: number of the sequence.
        token: the token; -1 if none can be chosen.
        logprobs: log-probabilities, where they are asked for.
        failed: why no token can be chosen; None: one was.
    """

    number: int
    token: int
    logprobs: TokenLogprobs | None = None
    failed: str | None = None


@dataclass(frozen=True)
class ModelOutput:
    """A worker has run an iteration.

    Attributes:
        chosen: tokens that it chose.
        bytes_sent: bytes that it sent to other ranks.
        scores: log-probabilities of tokens of prompts by their positions, by sequence, where they
            are asked for.
        planned_bytes: bytes that each sequence moved by the plans, where they are counted.
    """

    chosen: Sequence[SampledToken]
    bytes_sent: int
    scores: Mapping[int, Mapping[int, TokenLogprobs]] = field(default_factory=dict)
    planned_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Completion:
    """An answer to a prompt.

    Attributes:
        token_ids: tokens of the answer, the one that stopped it included.
        finish_reason: "stop", "length" if it has the most tokens, or "abort".
        ttft_seconds: seconds from the begin of the call to its first token.
        bytes_moved: bytes that ranks moved for it by the plans, where they are counted.
        logits: logits of each token where they are kept, float32 `[vocabulary]`.
        logprobs: log-probabilities of each token where they are asked for.
        prompt_logprobs: those of the prompt's tokens but the first, where they are asked for: the
            first answer has them.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    ttft_seconds: float = 0.0
    bytes_moved: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its answers.

    Attributes:
        prompt_token_ids: tokens of the prompt.
        outputs: answers, as many as were asked for.
    """

    prompt_token_ids: list[int]
    outputs: list[Completion]
