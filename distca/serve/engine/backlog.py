"""What workers are told of iterations: of those in which they have no part later, many at once."""

from __future__ import annotations

from collections.abc import Container, Iterator

from distca.inference.messages import ExecuteBatch, encode
from distca.serve.engine.messages import Missed

MOST_MISSED = 64
"""Iterations of which a worker is told at once: waking for each costs more than all of them do."""


class Backlog:
    """Iterations that workers have not been told of, since they had no part in them.

    Args:
        processes: number of workers.
    """

    def __init__(self, processes: int) -> None:
        self._missed: list[list[ExecuteBatch]] = [[] for _ in range(processes)]

    def tell(self, iteration: ExecuteBatch, parts: Container[int]) -> Iterator[tuple[int, bytes]]:
        """Returns encoded messages for workers, by their numbers, in the order of iterations.

        Args:
            iteration: the next one.
            parts: workers that have a part in it.
        """
        encoded = encode(iteration)
        for rank, missed in enumerate(self._missed):
            if rank not in parts:
                missed.append(iteration)
            if missed and (rank in parts or len(missed) == MOST_MISSED):
                yield rank, encode(Missed(missed))
                self._missed[rank] = []
            if rank in parts:
                yield rank, encoded
