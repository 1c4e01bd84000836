"""Chunks in line on their ranks: a chunk begins when all of its ranks have come to it.

Chunks join the lines of all of their ranks at once, in the order in which they were planned. So of
any two that share a rank the earlier one is ahead on every rank that they share, and no chunks can
wait for each other, however their groups overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from distca.schedule.serving.cdsp.groups import Ranks


class Job(Protocol):
    """A chunk that is computed on ranks."""

    @property
    def ranks(self) -> Ranks:
        """Members of its group."""
        ...


J = TypeVar("J", bound=Job)


class Lines(Generic[J]):
    """A line of chunks before each rank; the first of a line is what the rank computes, or will.

    Args:
        ranks: ranks that there are.
    """

    def __init__(self, ranks: int) -> None:
        self._lines: list[deque[J]] = [deque() for _ in range(ranks)]
        self._jobs: dict[J, None] = {}

    def __iter__(self) -> Iterator[J]:
        """Returns the chunks in line, in the order in which they joined."""
        return iter(self._jobs)

    def add(self, job: J) -> None:
        """Puts a chunk at the end of its ranks' lines."""
        self._jobs[job] = None
        for rank in job.ranks:
            self._lines[rank].append(job)

    def is_next(self, job: J) -> bool:
        """Returns whether all of a chunk's ranks have come to it."""
        return all(self._lines[rank][0] is job for rank in job.ranks)

    def remove(self, jobs: Iterable[J]) -> list[J]:
        """Takes chunks that are done, or given up, out of the lines.

        Returns:
            The first chunks of their ranks' lines that all ranks have come to; where one was given
            up that had not begun, some of them may have.
        """
        ranks: dict[int, None] = {}
        for job in jobs:
            del self._jobs[job]
            for rank in job.ranks:
                self._lines[rank].remove(job)
                ranks[rank] = None
        heads = (self._lines[rank][0] for rank in ranks if self._lines[rank])
        return [job for job in dict.fromkeys(heads) if self.is_next(job)]
