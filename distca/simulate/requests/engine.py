"""The engine of a simulation: its own `Scheduler`, and iterations that take predicted seconds.

`distca.inference.Engine` gives what the scheduler decides to workers. Here nothing is computed, and
an iteration lasts as long as `IterationCosts` say. Requests, blocks and what is fed are the same: a
test holds both engines' plans and bytes together, iteration by iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distca.schedule.serving.blocks import BlockPool, PrefixCache
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import SchedulerOutput, TokenUpdate
from distca.schedule.serving.scheduler import Scheduler
from distca.simulate.requests.costs import IterationCosts


@dataclass(frozen=True)
class SimulatedIteration:
    """An iteration that has begun.

    Attributes:
        batch: what the scheduler decided; nothing may be fed where blocks move.
        seconds: seconds that it takes.
    """

    batch: SchedulerOutput
    seconds: float


class SimulatedEngine:
    """Requests that wait and run, and the iteration under way.

    Args:
        limits: bounds and rules of the scheduler.
        costs: seconds of iterations.
        world_size: ranks that share a sequence's keys and values.
        blocks: blocks of each rank.
        block_size: tokens of a block.

    Attributes:
        scheduler: decides what iterations feed.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        costs: IterationCosts,
        world_size: int,
        blocks: int,
        block_size: int,
    ) -> None:
        self._costs = costs
        cache = PrefixCache(BlockPool(world_size, blocks, block_size))
        self.scheduler = Scheduler(cache, limits)
        self._running: SchedulerOutput | None = None

    @property
    def busy(self) -> bool:
        """Whether an iteration is under way."""
        return self._running is not None

    def add(self, number: int, tokens: Sequence[int], most_new: int, arrived: float = 0.0) -> None:
        """Adds a request.

        Args:
            number: a number that no other has.
            tokens: prompt; what they are matters to the prefix cache alone.
            most_new: tokens of the answer; 0: the prompt is computed, and held until `abort`.
            arrived: time of the arrival in seconds, which never goes back.

        Raises:
            ValueError: its keys and values could never be held.
        """
        self.scheduler.add(Request(number, [*tokens], most_new, arrived=arrived))

    def abort(self, number: int) -> bool:
        """Ends a request in whatever state it is; returns whether there was one."""
        return self.scheduler.abort(number)

    def begin(self) -> SimulatedIteration | None:
        """Begins the next iteration; None: there is nothing to do."""
        assert self._running is None, "an iteration is under way"
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        self._running = batch
        seconds = self._costs.seconds(batch.feeds, batch.moves) if batch.feeds else 0.0
        return SimulatedIteration(batch, seconds)

    def end(self, chosen: Mapping[int, int] | None = None) -> list[TokenUpdate]:
        """Ends the iteration.

        Args:
            chosen: token of each sequence that samples; None: 0 for all.

        Returns:
            Tokens of the requests that were not aborted meanwhile.
        """
        batch, self._running = self._running, None
        assert batch is not None, "no iteration is under way"
        if chosen is None:
            chosen = {feed.sequence: 0 for feed in batch.feeds if feed.samples}
        return self.scheduler.advance(batch, chosen)
