"""Messages between a server's API process, its engine and the workers: typed, and never pickled."""

from __future__ import annotations

import msgspec

from distca.inference.sampling import Penalties, SamplingParams, TokenLogprobs
from distca.schedule.serving.cdsp.load import Growth
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
    """

    number: int
    choice: int
    tokens: list[int]
    sampling: SamplingParams
    penalties: Penalties = Penalties()
    logprobs: int | None = None
    leader: int | None = None
    scored: bool = False


class Abort(Message, frozen=True):
    """A sequence that nobody waits for any more."""

    number: int


class ResetCache(Message, frozen=True):
    """Full blocks that are to be forgotten."""


class AskPlan(Message, frozen=True):
    """A question for the plan of a sequence's last chunk."""

    call: int
    number: int


class AskRates(Message, frozen=True):
    """A question for the improvement rates of prefills, or others to use from now on."""

    call: int
    by_arrivals: dict[float, Growth] | None


class Close(Message, frozen=True):
    """The engine is to end."""


ToEngine = AddRequest | Abort | ResetCache | AskPlan | AskRates | Close


class Output(Message, frozen=True):
    """A token of an answer.

    Attributes:
        number: number of the sequence.
        token: token that was chosen.
        finish: why the answer has ended; None: it goes on.
        found: tokens of the prompt that the prefix cache had.
        logprobs: log-probabilities of this token, where they are asked for.
        scores: log-probabilities of the prompt's tokens but the first, with the answer's first.
    """

    number: int
    token: int
    finish: FinishReason | None
    found: int
    logprobs: TokenLogprobs | None = None
    scores: list[TokenLogprobs] = []


class RankState(Message, frozen=True):
    """A rank: its blocks now, and its part of the last iteration.

    Attributes:
        free: blocks that hold nothing.
        referenced: blocks that sequences hold.
        cached: blocks that the prefix cache alone holds.
        tokens: tokens of the last iteration that it owned.
        bytes_sent: bytes that it sent in it.
        seconds: seconds that it took for it.
        weight_bytes: bytes of its weights.
    """

    free: int
    referenced: int
    cached: int
    tokens: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    weight_bytes: int = 0


class Stats(Message, frozen=True):
    """What the engine has done so far, and what it is doing.

    Attributes:
        iterations: iterations so far.
        running: sequences that run.
        waiting: sequences that wait.
        preemptions: times that a sequence gave up its blocks.
        computed: tokens that were fed to the model.
        looked_up: tokens of prompts that were looked up in the prefix cache.
        found: tokens of these that it had.
        bytes_moved: bytes that ranks sent each other.
        plan_seconds: seconds for plans, those of the slowest rank of each iteration.
        schedule_seconds: seconds for scheduling.
        step_seconds: seconds from the begin of iterations to their end.
        ranks: each rank.
    """

    iterations: int
    running: int
    waiting: int
    preemptions: int
    computed: int
    looked_up: int
    found: int
    bytes_moved: int
    plan_seconds: float
    schedule_seconds: float
    step_seconds: float
    ranks: list[RankState]


class Started(Message, frozen=True):
    """The engine is ready.

    Attributes:
        stats: nothing done yet.
        block_bytes: bytes of a block, all layers.
    """

    stats: Stats
    block_bytes: int


class Outputs(Message, frozen=True):
    """What an iteration brought."""

    outputs: list[Output]
    stats: Stats


class Refused(Message, frozen=True):
    """A sequence that can never be answered, and why.

    Attributes:
        number: number of the sequence.
        message: the reason.
        fails: whether the model is the reason, rather than the request.
    """

    number: int
    message: str
    fails: bool = False


class PlanIs(Message, frozen=True):
    """The plan that was asked for, as `distca.plan.saved` writes it; None: there is none."""

    call: int
    saved: str | None


class RatesAre(Message, frozen=True):
    """The improvement rates of prefills.

    Attributes:
        call: number of the question.
        by_arrivals: improvement rates by arrivals a second.
        arrivals: arrivals a second of the last 30 seconds.
        rate: improvement rate for them.
        most_ranks: most ranks of a group for them; None: any.
    """

    call: int
    by_arrivals: dict[float, Growth]
    arrivals: float
    rate: float
    most_ranks: int | None


class Dead(Message, frozen=True):
    """The engine ends: why."""

    message: str


FromEngine = Started | Outputs | Refused | PlanIs | RatesAre | Dead


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


class ScheduledRequest(Message, frozen=True):
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


class Moved(Message, frozen=True):
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


class Missed(Message, frozen=True):
    """Iterations in which the worker had no part: it takes in what changed, and says nothing."""

    iterations: list[ExecuteBatch]


class Begin(Message, frozen=True):
    """The blocks of every rank's pool, once all workers have said how many they have room for."""

    blocks: int


ToWorker = Begin | ExecuteBatch | Missed


class Loaded(Message, frozen=True):
    """A worker has loaded the model.

    Attributes:
        rank: its rank.
        blocks: blocks that it has room for.
        block_bytes: bytes of a block.
        weight_bytes: bytes of its weights.
    """

    rank: int
    blocks: int
    block_bytes: int
    weight_bytes: int = 0


class Beat(Message, frozen=True):
    """A worker is alive."""

    rank: int


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


class Scores(Message, frozen=True):
    """Log-probabilities of tokens of a prompt, by their positions."""

    number: int
    tokens: dict[int, TokenLogprobs]


class ModelOutput(Message, frozen=True):
    """A worker has run an iteration.

    Attributes:
        rank: its rank.
        number: number of the iteration.
        chosen: tokens that it chose.
        tokens: tokens that it owned.
        bytes_sent: bytes that it sent to other ranks.
        plan_seconds: seconds for the plan.
        seconds: seconds for everything.
        scores: log-probabilities of prompts, where they are asked for.
    """

    rank: int
    number: int
    chosen: list[SampledToken]
    tokens: int
    bytes_sent: int
    plan_seconds: float
    seconds: float
    scores: list[Scores] = []


class Failed(Message, frozen=True):
    """A worker fails, and ends."""

    rank: int
    message: str


FromWorker = Loaded | Beat | ModelOutput | Failed

_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Returns a message as bytes."""
    return _ENCODER.encode(message)


def decoder(kind: object) -> msgspec.msgpack.Decoder:
    """Makes what reads messages of some kinds; others raise `msgspec.ValidationError`."""
    return msgspec.msgpack.Decoder(kind)
