"""The engine: requests, their blocks, and what the next iteration feeds.

It computes nothing and talks to nobody. Whoever drives it runs what `schedule` returns on all
workers, and gives what they say to `finish`: `LLM` and `PrefillRank`, on ranks that all have an
engine. Engines that get the same requests decide the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from distca.inference.config import EngineConfig
from distca.inference.messages import (
    AddRequest,
    Admitted,
    Iteration,
    ModelOutput,
    Output,
    SampledToken,
)
from distca.inference.sampling import TokenLogprobs
from distca.schedule.serving.blocks import BlockPool, PrefixCache
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import SchedulerOutput
from distca.schedule.serving.scheduler import Scheduler


@dataclass
class EngineCounts:
    """What an engine has done so far.

    Attributes:
        iterations: iterations that have begun.
        computed: tokens that were fed to the model.
        bytes_moved: bytes that ranks sent each other.
    """

    iterations: int = 0
    computed: int = 0
    bytes_moved: int = 0


class Engine:
    """Requests that wait and run, and the iteration under way.

    Args:
        config: configuration of the engine.
        blocks: blocks of each rank's pool of keys and values.

    Attributes:
        cache: blocks of all ranks.
        scheduler: decides what iterations feed.
        counts: what was done so far.
    """

    def __init__(self, config: EngineConfig, blocks: int) -> None:
        self._config = config
        pool = BlockPool(config.parallel.world_size, blocks, config.cache.block_size)
        self.cache = PrefixCache(pool)
        salts = config.model.salt, config.sparse_salt
        self.scheduler = Scheduler(self.cache, config.scheduler, *salts)
        self.counts = EngineCounts()
        self._requests: dict[int, Admitted] = {}
        self._scores: dict[int, dict[int, TokenLogprobs]] = {}
        self._drop: list[int] = []
        self._batch: SchedulerOutput | None = None

    @property
    def busy(self) -> bool:
        """Whether an iteration is under way."""
        return self._batch is not None

    def add(self, asked: AddRequest) -> None:
        """Adds a request.

        Raises:
            ValueError: its keys and values could never be held.
        """
        assert asked.number not in self._requests, "a request has a number that no other has"
        sampling = asked.sampling
        request = Request(
            asked.number,
            asked.tokens,
            sampling.max_tokens,
            self._config.model.stops if sampling.stops is None else sampling.stops,
            asked.penalties.fewest,
            asked.leader,
            asked.scored,
            asked.chain,
            asked.group,
            asked.priority,
            asked.salt,
            asked.arrived,
        )
        self.scheduler.add(request)
        self._requests[asked.number] = Admitted(asked, request)

    def abort(self, number: int) -> bool:
        """Ends a request in whatever state it is; returns whether there was one."""
        known = self.scheduler.abort(number)
        if known:
            self._forget(number)
        return known

    def schedule(self) -> Iteration | None:
        """Begins the next iteration; None: there is nothing to do."""
        assert self._batch is None, "an iteration is under way"
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        self._batch = batch
        self._drop += batch.preempted
        admitted = [self._requests[feed.sequence] for feed in batch.feeds if feed.admitted]
        drop, self._drop = self._drop, []
        number = self.counts.iterations
        self.counts.iterations += 1
        self.counts.computed += sum(feed.count for feed in batch.feeds)
        return Iteration(number, batch, admitted, drop, self._members(batch))

    def finish(self, done: Mapping[int, ModelOutput]) -> tuple[list[Output], list[SampledToken]]:
        """Ends the iteration.

        Args:
            done: what each process with a part in it has run.

        Returns:
            The tokens of requests that were not aborted meanwhile, and those of requests that have
            ended since no token can be chosen for them.
        """
        batch = self._batch
        assert batch is not None, "no iteration is under way"
        said = [each for worker in done.values() for each in worker.chosen]
        # The scheduler gives their blocks back, and keeps none of them for others.
        failed = [each for each in said if each.failed is not None and self.abort(each.number)]
        chosen = {each.number: each for each in said}
        tokens = {number: each.token for number, each in chosen.items()}
        for number, scores in (each for worker in done.values() for each in worker.scores.items()):
            # Those of a request that was aborted meanwhile are forgotten.
            if number in self._requests:
                self._scores.setdefault(number, {}).update(scores)
        outputs = []
        for update in self.scheduler.advance(batch, tokens):
            number = update.sequence
            outputs.append(
                Output(
                    number,
                    update.token,
                    update.finish,
                    chosen[number].logprobs,
                    [each for _, each in sorted(self._scores.pop(number, {}).items())],
                )
            )
            if update.finish:
                self._forget(number)
        counts = self.counts
        counts.bytes_moved += sum(each.bytes_sent for each in done.values())
        self._batch = None
        return outputs, failed

    def _members(self, batch: SchedulerOutput) -> Collection[int]:
        """Processes that may have a part in an iteration: those that hold keys of what is fed, or
        all where prompts' attention is shared out."""
        config = self._config
        if batch.moves or not config.members_only or config.parallel.world_size == 1:
            return range(config.processes)
        if config.shares_attention and any(f.count > 1 or not f.start for f in batch.feeds):
            return range(config.processes)
        blocks = np.bincount(np.concatenate([feed.ranks for feed in batch.feeds]))
        ranks = np.flatnonzero(blocks).tolist()
        size = config.parallel.tensor_parallel_size
        return {rank * size + number for rank in ranks for number in range(size)}

    def _forget(self, number: int) -> None:
        """Forgets a request that has ended; workers do with the next iteration."""
        self._requests.pop(number, None)
        self._scores.pop(number, None)
        self._drop.append(number)
