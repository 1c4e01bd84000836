"""Which ranks own the blocks of the sequences that run, from iteration to iteration."""

from __future__ import annotations

from collections.abc import Sequence

from distca.schedule.serving.scheduled import SchedulerOutput


class BlockRanks:
    """The owners of the blocks of each sequence that runs or is held."""

    def __init__(self) -> None:
        self._ranks: dict[int, list[int]] = {}
        self._holders: dict[int, set[int]] = {}

    def take(self, batch: SchedulerOutput) -> None:
        """Takes in what an iteration changes."""
        for number in batch.preempted:
            self.forget(number)
        for feed in batch.feeds:
            if feed.admitted:
                self._ranks[feed.sequence], self._holders[feed.sequence] = [], set()
            ranks = [block.rank for block in feed.new_blocks]
            self._ranks[feed.sequence] += ranks
            self._holders[feed.sequence].update(ranks)
        # Sequences that gave up their blocks meanwhile have none that could move.
        moves = [move for move in batch.moves if move.sequence in self._ranks]
        for move in moves:
            self._ranks[move.sequence][move.index] = move.to.rank
        for sequence in {move.sequence for move in moves}:
            self._holders[sequence] = set(self._ranks[sequence])

    def of(self, sequence: int) -> Sequence[int]:
        """Returns the owner of each block of a sequence, in the order of positions."""
        return self._ranks[sequence]

    def holders(self, sequence: int) -> set[int]:
        """Returns the ranks that own blocks of a sequence."""
        return self._holders[sequence]

    def forget(self, sequence: int) -> bool:
        """Forgets a sequence; returns whether it had blocks."""
        self._holders.pop(sequence, None)
        return self._ranks.pop(sequence, None) is not None
