"""What an engine and its workers tell each other: typed values, which can be sent as messages."""

from __future__ import annotations

import msgspec

from distca.inference.sampling import NO_PENALTIES, Penalties, SamplingParams, TokenLogprobs
from distca.schedule.serving.request import FinishReason


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """A message; its first entry is its kind."""


class AddRequest(Message, frozen=True):
    """A sequence to answer.

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


class NewRequest(Message, frozen=True):
    """A sequence that begins to run, or begins again.

    Attributes:
        number: number of the sequence.
        choice: which of a request's answers it is.
        tokens: prompt, and the answer so far.
        prompt: tokens of the prompt.
        sampling: choice of tokens.
        penalties: changes of logits.
        logprobs: how many of the likeliest tokens are told with each token; None: none at all.
        scored: whether log-probabilities of the prompt's tokens are told as well.
    """

    number: int
    choice: int
    tokens: list[int]
    prompt: int
    sampling: SamplingParams
    penalties: Penalties
    logprobs: int | None
    scored: bool = False


class ScheduledRequest(Message, frozen=True, tag=False):
    """What an iteration feeds of a sequence.

    Attributes:
        number: number of the sequence.
        start: position of the first token that is fed.
        count: tokens that are fed.
        samples: whether the token that follows is chosen.
        ranks: owners of the blocks that were added.
        blocks: their numbers on these ranks.
        token: token that was chosen in the iteration before; None: none was.
    """

    number: int
    start: int
    count: int
    samples: bool
    ranks: list[int]
    blocks: list[int]
    token: int | None


class Moved(Message, frozen=True, tag=False):
    """A block that changes its rank.

    Attributes:
        sequence: number of the sequence that has it.
        index: number of the block among the sequence's.
        source: rank that has it.
        number: its number there.
        to: rank that gets it.
        becomes: its number there.
    """

    sequence: int
    index: int
    source: int
    number: int
    to: int
    becomes: int


class ExecuteBatch(Message, frozen=True):
    """A numbered iteration. Every worker runs them in the order of their numbers.

    Attributes:
        number: number of the iteration.
        drop: sequences that have ended, or gave up their blocks.
        admit: sequences that begin to run.
        feed: what is fed.
        moves: blocks that change their ranks before anything is written.
    """

    number: int
    drop: list[int]
    admit: list[NewRequest]
    feed: list[ScheduledRequest]
    moves: list[Moved] = []


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
