"""What a scheduler decides of an iteration, and what the iteration brought."""

from __future__ import annotations

from dataclasses import dataclass

from distca.plan.span import Int64s
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
        ranks: owners of the sequence's blocks, those of its new tokens included, int64 `[blocks]`.
        dense: whether nothing is dropped of its chunks, whatever the strategy: its prompt is short.
        samples: whether the token that follows is chosen.
        new_blocks: blocks that were added since the sequence's last feed; all, if `start` is that
            of its admission.
        admitted: whether the sequence was not running before.
    """

    sequence: int
    start: int
    count: int
    ranks: Int64s
    dense: bool = False
    samples: bool = False
    new_blocks: tuple[Block, ...] = ()
    admitted: bool = False


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
