"""What a scheduler decides of an iteration, what the iteration brought, and where blocks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distca.schedule.serving.blocks import Block
from distca.schedule.serving.moves import BlockTransfer
from distca.schedule.serving.request import FinishReason


@dataclass(frozen=True)
class ScheduledTokens:
    """What an iteration feeds of a sequence.

    Attributes:
        sequence: number of the sequence.
        start: position of the first token that is fed.
        count: tokens that are fed.
        samples: whether the token that follows is chosen.
        new_blocks: blocks that were added since the sequence's last feed; all, if `start` is that
            of its admission.
        admitted: whether the sequence was not running before.
        dense: whether nothing is dropped of its chunks, whatever the strategy: its prompt is short.
    """

    sequence: int
    start: int
    count: int
    samples: bool
    new_blocks: tuple[Block, ...]
    admitted: bool
    dense: bool


@dataclass(frozen=True)
class SchedulerOutput:
    """An iteration.

    Attributes:
        feeds: what is fed, the oldest sequence first.
        preempted: sequences that gave up their blocks, and wait again.
        moves: blocks that change their ranks before anything else.
    """

    feeds: tuple[ScheduledTokens, ...]
    preempted: tuple[int, ...]
    moves: tuple[BlockTransfer, ...] = ()


@dataclass(frozen=True)
class TokenUpdate:
    """What an iteration brought a sequence.

    Attributes:
        sequence: number of the sequence.
        token: token that was chosen.
        finish: why the answer has ended; None: it goes on.
    """

    sequence: int
    token: int
    finish: FinishReason | None


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
