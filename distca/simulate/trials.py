"""Trials: simulated iterations of configurations, on several processes.

A search asks for the first iterations of some configurations; `Trials` simulates those that it has
not simulated yet.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from distca.plan.span import Int64s
from distca.schedule import BufferBoundError
from distca.schedule.training.planner_process import PlannerProcess, ProcessEndedError
from distca.simulate.breakdown import Breakdown, simulate_and_break_down
from distca.simulate.hybrid import HYBRID
from distca.simulate.outcome import Outcome
from distca.simulate.workload import Candidate, Workload, simulate


@dataclass(frozen=True)
class Trial:
    """Figures of an iteration that a search compares.

    Attributes:
        fits: whether no GPU runs out of memory.
        seconds: time of the iteration.
        tokens: number of tokens in the global batch.
        memory_gb: memory of the GPU that needs most.
        idle: share of the time in which compute is not busy.
        exposed: share of the time in which compute waits for exchanges, and for others in them.
        parts: what the time is spent on; None: that was not asked for.
    """

    fits: bool
    seconds: float
    tokens: int
    memory_gb: float
    idle: float
    exposed: float
    parts: Breakdown | None = None

    @staticmethod
    def of(outcome: Outcome, parts: Breakdown | None = None) -> Trial:
        """Takes the figures of an outcome, and its parts."""
        return Trial(
            outcome.fits,
            outcome.seconds,
            outcome.tokens,
            float(outcome.memory_bytes.max()) / 1e9,
            outcome.idle,
            float(outcome.exposed.mean()) / outcome.seconds,
            parts,
        )

    @staticmethod
    def run(
        candidate: Candidate,
        workload: Workload,
        sequences: Sequence[Int64s],
        parts: bool = False,
    ) -> Trial:
        """Simulates an iteration; one that no plan can have does not fit."""
        try:
            if parts:
                return Trial.of(*simulate_and_break_down(candidate, workload, sequences))
            return Trial.of(simulate(candidate, workload, sequences))
        except BufferBoundError:
            return Trial.impossible(workload)

    @staticmethod
    def impossible(workload: Workload) -> Trial:
        """Figures of an iteration for which there is no plan."""
        none = float("nan")
        tokens = workload.sequences * workload.context
        return Trial(False, math.inf, tokens, math.inf, none, none)


class Told(Protocol):
    """What is called after each iteration, with the configuration."""

    def __call__(self, candidate: Candidate, /) -> None: ...


_Unit: TypeAlias = tuple[Candidate, int, bool]
"""A configuration, the number of the batch, and whether its time is broken down."""


class Trials:
    """Iterations of a workload's configurations, each simulated once; a context manager.

    Args:
        workload: model, cluster and sizes.
        batches: sequences of each global batch, as `simulate` takes them.
        processes: number of processes that simulate; 1: this one. With several, hybrid context
            parallelism has a further one of its own: Megatron's scheduler takes 700 MB there, and
            keeps it busy while the others plan.
        told: function that is called after each iteration, on the thread that asks for it.
    """

    def __init__(
        self,
        workload: Workload,
        batches: Sequence[Sequence[Int64s]],
        processes: int = 1,
        told: Told = lambda candidate: None,
    ) -> None:
        self._workload, self._batches, self._told = workload, batches, told
        self._found: dict[Candidate, list[Trial]] = {}
        # Configurations that are known not to fit in some batch.
        self._failed: set[Candidate] = set()
        self._processes = processes
        self._stack = ExitStack()
        self._threads: ThreadPoolExecutor | None = None
        self._free: queue.SimpleQueue[PlannerProcess[Trial]] = queue.SimpleQueue()
        self._hybrid: PlannerProcess[Trial] | None = None

    @property
    def has_processes(self) -> bool:
        """Whether systems may be searched on threads, beside each other."""
        return self._processes > 1

    def _start(self) -> PlannerProcess[Trial]:
        process = PlannerProcess(Trial.run, "the simulating process")
        # Before the threads end: a call that one waits for ends, too.
        self._stack.callback(process.close)
        return process

    def __enter__(self) -> Trials:
        if self.has_processes:
            # Here, on the main thread: a process ends with the thread that made it.
            self._threads = self._stack.enter_context(ThreadPoolExecutor(self._processes))
            for _ in range(self._processes):
                self._free.put(self._start())
            self._hybrid = self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def first(
        self, some: Sequence[Candidate], count: int, *, parts: bool = False
    ) -> dict[Candidate, list[Trial]]:
        """Returns the trials of the first batches, up to one in which a configuration doesn't fit.

        Args:
            some: configurations.
            count: number of batches.
            parts: whether the first batch of those that run it now is broken down, too.
        """
        missing = [
            (candidate, number, parts and number == 0)
            for candidate in some
            for number in range(len(self._found.get(candidate, ())), count)
            if all(each.fits for each in self._found.get(candidate, ()))
        ]
        for (candidate, *_), each in zip(missing, self._run(missing), strict=True):
            mine = self._found.setdefault(candidate, [])
            if each is not None and all(other.fits for other in mine):
                mine.append(each)
        return {candidate: self._found[candidate] for candidate in some}

    def _run(self, units: Sequence[_Unit]) -> Iterator[Trial | None]:
        """Simulates configurations in batches; None: another batch is known not to fit."""
        if self._threads is None:
            found: Iterable[Trial | None] = (self._if_able(self._here, unit) for unit in units)
        elif any(each.system == HYBRID for each, *_ in units):
            hybrid = self._hybrid
            assert hybrid is not None
            found = (self._if_able(partial(self._in, hybrid), unit) for unit in units)
        else:
            found = self._threads.map(partial(self._if_able, self._elsewhere), units)
        for (candidate, *_), each in zip(units, found, strict=True):
            if each is not None:
                self._told(candidate)
            yield each

    def _if_able(self, simulate: Callable[[_Unit], Trial], unit: _Unit) -> Trial | None:
        """Simulates a configuration, unless it is known not to fit in another batch."""
        candidate, *_ = unit
        if candidate in self._failed:
            return None
        found = simulate(unit)
        if not found.fits:
            self._failed.add(candidate)
        return found

    def _here(self, unit: _Unit) -> Trial:
        candidate, number, parts = unit
        return Trial.run(candidate, self._workload, self._batches[number], parts)

    def _elsewhere(self, unit: _Unit) -> Trial:
        process = self._free.get()
        try:
            return self._in(process, unit)
        finally:
            self._free.put(process)

    def _in(self, process: PlannerProcess[Trial], unit: _Unit) -> Trial:
        candidate, number, parts = unit
        try:
            return process(candidate, self._workload, self._batches[number], parts)
        except ProcessEndedError as error:
            raise ChildProcessError(str(error)) from None
