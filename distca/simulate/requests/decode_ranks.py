"""Choice of the rank that decodes a request: the freest one, counting what is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeRank:
    """Load of a rank, or of a tensor-parallel group of ranks, that decodes.

    Attributes:
        blocks: blocks of its pool.
        used: blocks of requests that decode.
        virtual: blocks of requests whose keys and values are under way, or will be.
        batch: requests that decode.
    """

    blocks: int
    used: int = 0
    virtual: int = 0
    batch: int = 0

    @property
    def available(self) -> int:
        """Blocks that nobody has or will have."""
        return self.blocks - self.used - self.virtual

    @property
    def freeness(self) -> float:
        """Available blocks for each request of the batch, as Llumnix has it."""
        return self.available / max(self.batch, 1)


def choose_decode_rank(ranks: Sequence[DecodeRank], blocks: int) -> int | None:
    """Returns the freest rank that has that many blocks; None where the request must wait.

    Ranks without a batch have the freeness of a batch of one; of equally free ones, that with more
    blocks and then the first is chosen.

    Raises:
        ValueError: no rank could ever hold the request.
    """
    largest = max((rank.blocks for rank in ranks), default=0)
    if blocks > largest:
        raise ValueError(
            f"a request of {blocks} blocks is larger than the largest pool of a decode rank, of "
            f"{largest} blocks: give decode ranks more memory, or the request fewer tokens"
        )
    fitting = [number for number, rank in enumerate(ranks) if rank.available >= blocks]
    return max(
        fitting,
        key=lambda n: (ranks[n].freeness, ranks[n].available, -n),
        default=None,
    )
