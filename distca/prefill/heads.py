"""Which rank sends which heads of keys and values to which process of an engine.

Neighbouring ranks share each layer, so each holds the keys and values of some heads alone. The
processes of an engine share layers, too, perhaps by another number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadSlices:
    """Key-value heads of a layer, and the ranks that share them.

    Attributes:
        kv_heads: heads of the whole layer.
        tensor_parallel_size: ranks that share each layer. It divides the heads, or they divide it:
            then several ranks hold the same head.
        ranks: all ranks.
    """

    kv_heads: int
    tensor_parallel_size: int
    ranks: int

    def held(self, rank: int) -> range:
        """Heads that a rank holds."""
        first = rank % self.tensor_parallel_size * self.kv_heads // self.tensor_parallel_size
        return range(first, first + max(self.kv_heads // self.tensor_parallel_size, 1))

    def sent(self, rank: int, worker: int, wanted: range) -> range:
        """Heads that a rank sends to a process of an engine.

        Args:
            rank: number of the rank.
            worker: number of the process.
            wanted: heads that the process wants.
        """
        copies = max(self.tensor_parallel_size // self.kv_heads, 1)
        # One of those that hold the same heads sends them; processes choose different ones.
        if rank % copies != worker % copies:
            return range(0)
        held = self.held(rank)
        common = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
        return common if common else range(0)

    def senders(self, worker: int, wanted: range) -> tuple[int, ...]:
        """Numbers of the ranks that send rows to a process of an engine; see `sent`."""
        return tuple(rank for rank in range(self.ranks) if self.sent(rank, worker, wanted))
