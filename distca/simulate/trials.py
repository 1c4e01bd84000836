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
from typing import Any, Protocol, TypeAlias, TypeVar

from distca.plan.span import Int64s
from distca.schedule import BufferBoundError
from distca.schedule.training.planner_process import PlannerProcess, ProcessEndedError
from distca.simulate.breakdown import Breakdown, break_down, simulate_and_break_down
from distca.simulate.hybrid import HYBRID
from distca.simulate.outcome import Outcome
from distca.simulate.parts import Part, PartFigures, RunParts
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
        from_part: whether only a part of the iteration was simulated, and stands for it.
    """

    fits: bool
    seconds: float
    tokens: int
    memory_gb: float
    idle: float
    exposed: float
    parts: Breakdown | None = None
    from_part: bool = False

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

    def scaled(self, whole: Trial, part: Trial, usable: float) -> Trial:
        """Returns the figures of a whole iteration, where these are of a part of it.

        Args:
            whole: figures of another batch's iteration.
            part: figures of the same part of that iteration.
            usable: bytes of a GPU.
        """
        memory = self.memory_gb * whole.memory_gb / part.memory_gb
        return Trial(
            memory * 1e9 <= usable,
            self.seconds * whole.seconds / part.seconds,
            whole.tokens,
            memory,
            self.idle + whole.idle - part.idle,
            self.exposed + whole.exposed - part.exposed,
            from_part=True,
        )

    @staticmethod
    def impossible(workload: Workload) -> Trial:
        """Figures of an iteration for which there is no plan."""
        none = float("nan")
        tokens = workload.sequences * workload.context
        return Trial(False, math.inf, tokens, math.inf, none, none)


class Told(Protocol):
    """What is called after each iteration, with the configuration."""

    def __call__(self, candidate: Candidate, /) -> None: ...


Found = TypeVar("Found")


def _call(function: Callable[..., Found], *arguments: object) -> Found:
    """Calls a function, in a simulating process."""
    return function(*arguments)


_Process: TypeAlias = PlannerProcess[Any]
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
        self._free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._hybrid: _Process | None = None

    @property
    def has_processes(self) -> bool:
        """Whether systems may be searched on threads, beside each other."""
        return self._processes > 1

    def _start(self) -> _Process:
        process = PlannerProcess(_call, "the simulating process")
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

    def best_so_far(self, system: str) -> tuple[Candidate, list[float]] | None:
        """Returns the fastest configuration of a system up to now, even while others run.

        It is one of those that have run the most batches, as those that promise most do.

        Args:
            system: one of `SYSTEMS`.

        Returns:
            The configuration, and its seconds of an iteration in each of the first batches, which
            it has run; None: none that fits has run.
        """
        ran = {
            candidate: [*trials]
            for candidate, trials in [*self._found.items()]
            if candidate.system == system
        }
        seconds = {
            candidate: [each.seconds for each in trials]
            for candidate, trials in ran.items()
            if trials and all(each.fits for each in trials)
        }
        if not seconds:
            return None
        best = min(seconds, key=lambda c: (-len(seconds[c]), sum(seconds[c]) / len(seconds[c])))
        return best, seconds[best]

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
        return self._on_a_free_one(lambda process: self._in(process, unit))

    def _on_a_free_one(self, call: Callable[[_Process], Found]) -> Found:
        process = self._free.get()
        try:
            return call(process)
        finally:
            self._free.put(process)

    def _in(self, process: _Process, unit: _Unit) -> Trial:
        candidate, number, parts = unit
        return self._ask(process, Trial.run, candidate, number, parts)

    def _ask(
        self,
        process: _Process,
        function: Callable[..., Found],
        candidate: Candidate,
        number: int,
        *others: object,
    ) -> Found:
        """Calls a function of a configuration, the workload and a batch in a process."""
        try:
            found: Found = process(
                function, candidate, self._workload, self._batches[number], *others
            )
        except ProcessEndedError as error:
            raise ChildProcessError(str(error)) from None
        return found

    def break_down(self, candidate: Candidate) -> Breakdown:
        """Says what the first batch's time is spent on, as `breakdown.break_down` does."""
        if self._threads is None:
            return break_down(candidate, self._workload, self._batches[0])
        if candidate.system == HYBRID:
            assert self._hybrid is not None
            return self._ask(self._hybrid, break_down, candidate, 0)
        return self._on_a_free_one(lambda process: self._ask(process, break_down, candidate, 0))

    def parts_of(self, number: int) -> RunParts:
        """Returns what simulates parts of a batch's iterations.

        Args:
            number: number of the batch.
        """

        def run(part: Part[PartFigures], some: Sequence[Candidate]) -> list[PartFigures]:
            def one(candidate: Candidate) -> PartFigures:
                if self._threads is None:
                    return part(candidate, self._workload, self._batches[number])
                return self._on_a_free_one(
                    lambda process: self._ask(process, part, candidate, number)
                )

            each = map(one, some) if self._threads is None else self._threads.map(one, some)
            found = []
            for candidate, figures in zip(some, each, strict=True):
                self._told(candidate)
                found.append(figures)
            return found

        return run
