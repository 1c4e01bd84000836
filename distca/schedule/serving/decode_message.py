"""What an engine sends ranks for a decode step: 16 bytes a sequence, however long its context.

Ranks note the same steps as the engine, so they plan the step themselves, and check that the
message is of it. Blocks alone have to be told, since one side has their accounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distca.plan import Mask
from distca.plan.span import Int64s
from distca.schedule.serving.accounts import NewBlocks
from distca.schedule.serving.decode import DecodeBatch, plan_decode
from distca.schedule.serving.holdings import Holdings

Int32s = NDArray[np.int32]

_NO_BLOCK = -1
_BYTES = 16


@dataclass(frozen=True)
class DecodeMessage:
    """A decode step as it is sent.

    Attributes:
        sequences: sequences that are fed.
        tokens: token of each.
        blocks: block that each one's owner adds; below 0: none.
    """

    sequences: Int64s
    tokens: Int32s
    blocks: Int32s

    @staticmethod
    def of(decode: DecodeBatch, tokens: Sequence[int], blocks: NewBlocks) -> DecodeMessage:
        """Tells a step; `tokens` are of its sequences, and `blocks` those that were taken."""
        owned = zip(decode.sequences, decode.owners.tolist(), strict=True)
        added = [blocks.get(each, (_NO_BLOCK,))[0] for each in owned]
        sequences = np.array(decode.sequences, dtype=np.int64)
        return DecodeMessage(sequences, *np.array([tokens, added], dtype=np.int32))

    def encode(self) -> bytes:
        """Returns the message as bytes."""
        return b"".join(each.tobytes() for each in (self.sequences, self.tokens, self.blocks))

    @staticmethod
    def decode(message: bytes) -> DecodeMessage:
        """Reads a message.

        Raises:
            ValueError: it is of another length.
        """
        count, rest = divmod(len(message), _BYTES)
        if rest:
            raise ValueError(f"{len(message)} bytes are no message of a decode step")
        sequences = np.frombuffer(message, np.int64, count)
        rest_of = np.frombuffer(message, np.int32, 2 * count, 8 * count)
        return DecodeMessage(sequences, rest_of[:count], rest_of[count:])

    def plan(
        self, holdings: Holdings, masks: Sequence[Mask], blocks: int, block_size: int
    ) -> tuple[DecodeBatch, NewBlocks]:
        """Plans the step on a rank, and notes it.

        Args:
            holdings: who holds the tokens before, and afterwards those of the step.
            masks: masks of the model's layers.
            blocks: blocks of each rank's pool.
            block_size: rows of a block.

        Returns:
            The step, and the blocks that it adds.

        Raises:
            ValueError: the message is not of this rank's next step; nothing is noted.
        """
        sequences = self.sequences.tolist()
        unknown = [each for each in sequences if each not in holdings]
        if unknown or len({*sequences}) < len(sequences):
            raise ValueError(f"a decode step of {unknown or sequences}: no such sequences are held")
        decode = plan_decode(holdings, sequences, masks)
        fills = decode.before[np.arange(len(sequences)), decode.owners] % block_size != 0
        inside = (self.blocks >= 0) & (self.blocks < blocks)
        wrong = np.flatnonzero(np.where(fills, self.blocks != _NO_BLOCK, ~inside))
        if len(wrong):
            number = int(wrong[0])
            raise ValueError(
                f"sequence {sequences[number]} at position {decode.positions[number]} is given "
                f"the block {self.blocks[number]} of rank {decode.owners[number]}, which it "
                + ("does not need" if fills[number] else "does not have")
            )
        found = {
            (sequences[n], int(decode.owners[n])): (int(self.blocks[n]),)
            for n in np.flatnonzero(~fills).tolist()
        }
        holdings.note_decoded(holdings.lines(sequences))
        return decode, found
