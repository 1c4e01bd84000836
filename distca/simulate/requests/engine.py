"""The engine of a simulation: its own `Scheduler`, and iterations that take predicted seconds.

`distca.inference.Engine` gives what the scheduler decides to workers. Here nothing is computed, and
an iteration lasts as long as `IterationCosts` say. Requests, blocks and what is fed are the same: a
test holds both engines' plans and bytes together, iteration by iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distca.schedule.serving.blocks import BlockPool, PrefixCache
from distca.schedule.serving.iteration import BatchEntry
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.moves import BlockTransfer
from distca.schedule.serving.scheduled import BlockRanks, SchedulerOutput, TokenUpdate
from distca.schedule.serving.scheduler import Scheduler
from distca.simulate.requests.costs import IterationCosts


@dataclass(frozen=True)
class SimulatedIteration:
    """An iteration that has begun.

    Attributes:
        batch: what the scheduler decided.
        entries: what is fed, and who owns the blocks, as workers plan by it; empty where blocks
            move and nothing is fed.
        seconds: seconds that it takes.
    """

    batch: SchedulerOutput
    entries: tuple[BatchEntry, ...]
    seconds: float

    @property
    def moves(self) -> Sequence[BlockTransfer]:
        """Blocks that change their rank before."""
        return self.batch.moves


class SimulatedEngine:
    """Requests that wait and run, and the iteration under way.

    Args:
        limits: bounds and rules of the scheduler.
        costs: seconds of iterations.
        world_size: ranks that share a sequence's keys and values.
        blocks: blocks of each rank.
        block_size: tokens of a block.
        prefix_caching: whether full blocks are kept for other sequences.

    Attributes:
        scheduler: decides what iterations feed.
        ranks: owners of the blocks of sequences that run or are held.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        costs: IterationCosts,
        world_size: int,
        blocks: int,
        block_size: int,
        prefix_caching: bool = False,
    ) -> None:
        self._costs = costs
        cache = PrefixCache(BlockPool(world_size, blocks, block_size), prefix_caching)
        self.scheduler = Scheduler(cache, limits)
        self.ranks = BlockRanks()
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
        self.scheduler.add(number, tokens, most_new, arrived=arrived)

    def abort(self, number: int) -> bool:
        """Ends a request in whatever state it is; returns whether there was one."""
        found = self.scheduler.abort(number)
        if found:
            self.ranks.forget(number)
        return found

    def begin(self) -> SimulatedIteration | None:
        """Begins the next iteration; None: there is nothing to do."""
        assert self._running is None, "an iteration is under way"
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        self._running = batch
        self.ranks.take(batch)
        entries = tuple(
            BatchEntry(
                feed.sequence,
                feed.start,
                feed.count,
                np.array(self.ranks.of(feed.sequence), dtype=np.int64),
                feed.dense,
            )
            for feed in batch.feeds
        )
        seconds = self._costs.seconds(entries, batch.moves) if entries else 0.0
        return SimulatedIteration(batch, entries, seconds)

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
        updates = self.scheduler.advance(batch, chosen)
        for update in updates:
            if update.finish:
                self.ranks.forget(update.sequence)
        return updates
