"""Messages between a server's API process, its engine and the workers' processes."""

from __future__ import annotations

from distca.inference.messages import AddRequest, ExecuteBatch, Message, ModelOutput, Output
from distca.schedule.serving.cdsp.load import Growth


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


class Failed(Message, frozen=True):
    """A worker fails, and ends."""

    rank: int
    message: str


FromWorker = Loaded | Beat | ModelOutput | Failed
