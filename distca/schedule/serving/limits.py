"""Bounds and rules of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.csps.levels import Levels
from distca.schedule.serving.partitions import Chain


@dataclass(frozen=True)
class SchedulerConfig:
    """Bounds and rules of a scheduler.

    Attributes:
        max_num_seqs: most sequences that run at a time.
        max_num_batched_tokens: most tokens that an iteration feeds; with groups that grow each rank
            computes at most an equal share of them.
        stripe: consecutive decoded positions of a long sequence that one rank owns; a multiple of
            the blocks' size.
        threshold: tokens from which a sequence is long, and ranks share it.
        servers: ranks, the last ones, that hold keys and values, and have no weights.
        chain: who shares out chunks of long sequences, a chain or levels; None: in zigzag.
        evens_out: whether blocks move once a prompt is computed, until all ranks hold equal shares,
            as a chain does not leave them.
        growing: how each long sequence is given ranks of its own; None: it has all ranks.
        prefix_caching: whether full blocks are kept for sequences that come later.
        equal_shares: whether the short sequences of a rank are fed at most an equal share of an
            iteration's tokens, and new ones go to the rank with least left to compute.

    Raises:
        ValueError: the limits contradict each other.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    stripe: int
    threshold: int
    servers: int = 0
    chain: Chain | Levels | None = None
    evens_out: bool = False
    growing: GrowingGroups | None = None
    prefix_caching: bool = True
    equal_shares: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"an iteration of {self.max_num_batched_tokens} tokens cannot feed one of each of "
                f"{self.max_num_seqs} sequences: raise --max-num-batched-tokens, or lower "
                "--max-num-seqs"
            )
        if self.growing is not None and (self.chain is not None or self.evens_out):
            raise ValueError(
                "groups that grow share out prompts themselves: leave the chain, the levels and "
                "evening out"
            )
        if self.equal_shares and (self.growing is not None or self.evens_out):
            raise ValueError(
                "ranks that have equal shares keep their own prompts: leave groups that grow and "
                "evening out"
            )
