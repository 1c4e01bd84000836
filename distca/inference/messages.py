"""What an engine and its workers tell each other. They share a process: what a worker says of an
iteration is what is sent, to the other processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from distca.inference.sampling import NO_PENALTIES, Penalties, SamplingParams, TokenLogprobs
from distca.schedule.serving.request import FinishReason, Request
from distca.schedule.serving.scheduled import SchedulerOutput


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """A message; its first entry is its kind."""


class AddRequest(Message, frozen=True):
    """A sequence to answer, as it is asked for. `Request` is how far it is.

    Attributes:
        number: a number that no other sequence has.
        choice: which of a request's answers it is.
        tokens: prompt.
        sampling: choice of tokens.
        penalties: changes of logits.
        logprobs: how many of the likeliest tokens are told with each token; None: none at all.
        leader: number of the sequence that computes the prompt for this one, too, and that is told
            of after it; None: itself does.
        scored: whether log-probabilities of the prompt's tokens are told as well.
        priority: sequences of a lower number run before those of a higher one.
        salt: what else keys and values depend on: only sequences of the same salt share blocks.
        arrived: time of the arrival in seconds, which never goes back.
    """

    number: int
    choice: int
    tokens: list[int]
    sampling: SamplingParams
    penalties: Penalties = NO_PENALTIES
    logprobs: int | None = None
    leader: int | None = None
    scored: bool = False
    priority: int = 0
    salt: bytes = b""
    arrived: float = 0.0


class Output(Message, frozen=True):
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
    scores: list[TokenLogprobs] = []


@dataclass(frozen=True)
class Iteration:
    """A numbered iteration. Every worker takes in all of them, in the order of their numbers.

    Attributes:
        number: number of the iteration.
        batch: what is fed, which blocks that adds, and which blocks change their ranks before.
        admitted: requests that begin to run, or begin again: what is asked for, and how far it is.
        drop: requests that have ended, or gave up their blocks.
        members: processes that have a part in it.
    """

    number: int
    batch: SchedulerOutput
    admitted: Sequence[tuple[AddRequest, Request]]
    drop: Sequence[int]
    members: Collection[int]


class SampledToken(Message, frozen=True):
    """A token that was chosen for a sequence.

    Attributes:
        number: number of the sequence.
        token: the token; -1 if none can be chosen.
        logprobs: log-probabilities, where they are asked for.
        failed: why no token can be chosen; None: one was.
    """

    number: int
    token: int
    logprobs: TokenLogprobs | None
    failed: str | None = None


class Scores(Message, frozen=True, tag=False):
    """Log-probabilities of tokens of a prompt, by their positions."""

    number: int
    tokens: dict[int, TokenLogprobs]


class ModelOutput(Message, frozen=True):
    """A worker has run an iteration.

    Attributes:
        chosen: tokens that it chose.
        bytes_sent: bytes that it sent to other ranks.
        scores: log-probabilities of prompts, where they are asked for.
        planned_bytes: bytes that each sequence moved by the plans, where they are counted.
    """

    chosen: list[SampledToken]
    bytes_sent: int
    scores: list[Scores] = []
    planned_bytes: dict[int, int] = {}


_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Returns a message as bytes."""
    return _ENCODER.encode(message)


def decoder(kind: object) -> msgspec.msgpack.Decoder:
    """Makes what reads messages of some kinds; others raise `msgspec.ValidationError`."""
    return msgspec.msgpack.Decoder(kind)
