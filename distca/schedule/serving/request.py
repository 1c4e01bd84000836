"""A sequence as the scheduler of a serving engine follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from distca.schedule.serving.blocks import Block
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.cdsp.pieces import Piece
from distca.schedule.serving.partitions import Chain

FinishReason = Literal["stop", "length", "abort"]
"""Why an answer has ended: by a token that ends answers, by its length, or at someone's wish."""


def finish_of(
    tokens: Sequence[int], most: int, fewest: int, stops: frozenset[int]
) -> FinishReason | None:
    """Says why an answer ends with its last token; None: it goes on.

    Args:
        tokens: prompt, and the answer so far.
        most: most tokens of both.
        fewest: fewest tokens of both that `stops` may end.
        stops: tokens that end an answer.
    """
    if tokens[-1] in stops and len(tokens) > fewest:
        return "stop"
    return "length" if len(tokens) == most else None


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
        chain: chain that shares out the prompt; None: that of all sequences.
        group: ranks that compute all of the prompt, where groups grow; None: they are planned.
        settled: full blocks of which it is known whether they move.
        evened_out: whether its blocks have been moved so that ranks hold equal shares.
        pieces: chunks of a prompt that has ranks of its own, with these ranks.
        priority: sequences of a lower number are admitted before those of a higher one.
        salt: what its keys and values depend on beside its tokens and the model.
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
    chain: Chain | None = None
    group: Ranks | None = None
    settled: int = 0
    evened_out: bool = False
    pieces: Sequence[Piece] = ()
    priority: int = 0
    salt: bytes = b""

    @property
    def holds(self) -> bool:
        """Whether only its prompt is computed, for others that read its blocks."""
        return self.most == self.prompt

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer has ended with its last token; None: it goes on."""
        return finish_of(self.tokens, self.most, self.fewest, self.stops)

    @property
    def left(self) -> Sequence[Piece]:
        """Chunks, of those with ranks of their own, that are not all computed."""
        return [piece for piece in self.pieces if piece.end > self.computed]

    @property
    def full(self) -> int:
        """Blocks whose keys and values are all computed."""
        return self.computed // self.block_size
