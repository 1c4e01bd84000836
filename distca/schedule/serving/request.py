"""A sequence as the scheduler of a serving engine follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distca.schedule.serving.prefix_cache import Block


@dataclass
class SharedPrompt:
    """A prompt with several answers, once it is computed.

    Attributes:
        digests: digests of its full blocks.
        waiting: sequences that have not taken its blocks yet.
    """

    digests: Sequence[bytes]
    waiting: int


@dataclass
class Request:
    """A sequence from its arrival to its end.

    Attributes:
        number: number, by which the engine knows it.
        tokens: prompt, and the answer so far.
        prompt: tokens of the prompt.
        most: most tokens of prompt and answer.
        stops: tokens that end the answer.
        fewest: fewest tokens of prompt and answer that `stops` may end.
        computed: tokens whose keys and values its blocks hold, while it runs.
        blocks: its blocks, in the order of positions.
        digests: digests of its full blocks as far as they are known.
        home: rank of a short sequence.
        fed: tokens that the iteration under way feeds.
        preempted: times that it gave up its blocks.
        scored: whether all tokens of its prompt are to be computed, since they are scored.
        prefix: prompt that others computed for it; None: there is none.
        block_size: tokens of a block.
        settled: full blocks of which it is known whether they move.
    """

    number: int
    tokens: list[int]
    prompt: int
    most: int
    stops: frozenset[int]
    fewest: int = 0
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    home: int = 0
    fed: int = 0
    preempted: int = 0
    scored: bool = False
    prefix: SharedPrompt | None = None
    block_size: int = 1
    settled: int = 0

    @property
    def full(self) -> int:
        """Blocks whose keys and values are all computed."""
        return self.computed // self.block_size
