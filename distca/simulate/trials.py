"""Trials: simulated iterations of configurations, on several processes.

A search asks for the first iterations of some configurations; `Trials` simulates those that it has
not simulated yet.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from distca.plan.span import Int64s
from distca.schedule import BufferBoundError
from distca.schedule.training.planner_process import PlannerProcess, ProcessEndedError
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
    """

    fits: bool
    seconds: float
    tokens: int
    memory_gb: float
    idle: float
    exposed: float

    @staticmethod
    def of(outcome: Outcome) -> Trial:
        """Takes the figures of an outcome."""
        return Trial(
            outcome.fits,
            outcome.seconds,
            outcome.tokens,
            float(outcome.memory_bytes.max()) / 1e9,
            outcome.idle,
            float(outcome.exposed.mean()) / outcome.seconds,
        )

    @staticmethod
    def run(candidate: Candidate, workload: Workload, sequences: Sequence[Int64s]) -> Trial:
        """Simulates an iteration; one that no plan can have does not fit."""
        try:
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


class Trials:
    """Iterations of a workload's configurations, each simulated once; a context manager.

    Args:
        workload: model, cluster and sizes.
        batches: sequences of each global batch, as `simulate` takes them.
        processes: number of processes that simulate; 1: this one.
        told: function that is called after each iteration.
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
        self._processes, self._running = processes, 0
        self._stack = ExitStack()
        self._threads: ThreadPoolExecutor | None = None
        self._free: queue.SimpleQueue[PlannerProcess[Trial]] = queue.SimpleQueue()

    def _start(self, processes: int) -> None:
        """Starts simulating processes in place of those that run, unless as many run."""
        if processes == self._running:
            return
        self._stack.close()
        self._free = queue.SimpleQueue()
        self._threads = self._stack.enter_context(ThreadPoolExecutor(processes))
        for _ in range(processes):
            process = PlannerProcess(Trial.run, "the simulating process")
            # Before the threads end: a call that one waits for ends, too.
            self._stack.callback(process.close)
            self._free.put(process)
        self._running = processes

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def first(self, some: Sequence[Candidate], count: int) -> dict[Candidate, list[Trial]]:
        """Returns the trials of the first batches, up to one in which a configuration doesn't fit.

        Args:
            some: configurations.
            count: number of batches.
        """
        missing = [
            (candidate, number)
            for candidate in some
            for number in range(len(self._found.get(candidate, ())), count)
            if all(each.fits for each in self._found.get(candidate, ()))
        ]
        for (candidate, _), each in zip(missing, self._run(missing), strict=True):
            mine = self._found.setdefault(candidate, [])
            if all(other.fits for other in mine):
                mine.append(each)
        return {candidate: self._found[candidate] for candidate in some}

    def _run(self, units: Sequence[tuple[Candidate, int]]) -> Iterator[Trial]:
        """Simulates configurations in batches, given by number."""
        if self._processes == 1 or not units:
            found: Iterable[Trial] = (self._here(*unit) for unit in units)
        else:
            # Megatron's scheduler takes 700 MB in a process that loads it: one does, alone.
            hybrid = any(each.system == HYBRID for each, _ in units)
            self._start(1 if hybrid else self._processes)
            assert self._threads is not None
            found = self._threads.map(self._elsewhere, units)
        for (candidate, _), each in zip(units, found, strict=True):
            self._told(candidate)
            yield each

    def _here(self, candidate: Candidate, number: int) -> Trial:
        return Trial.run(candidate, self._workload, self._batches[number])

    def _elsewhere(self, unit: tuple[Candidate, int]) -> Trial:
        candidate, number = unit
        process = self._free.get()
        try:
            return process(candidate, self._workload, self._batches[number])
        except ProcessEndedError as error:
            raise ChildProcessError(str(error)) from None
        finally:
            self._free.put(process)
