"""A sequence as the scheduler of a serving engine follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from distca.schedule.serving.blocks import SequenceBlocks
from distca.schedule.serving.cdsp.chunks import Piece
from distca.schedule.serving.cdsp.groups import Ranks
from distca.schedule.serving.partitions import Chain

FinishReason = Literal["stop", "length", "abort"]
"""Why an answer has ended: by a token that ends answers, by its length, or at someone's wish."""


@dataclass
class Request:
    """A sequence from its arrival to its end: what is asked for, and behind that how far it is.

    Attributes:
        number: a number that no other sequence has.
        tokens: prompt, at least one token, and the answer so far.
        most_new: most tokens of the answer; 0: none is chosen, and the blocks of the prompt are
            held once it is computed, until it is aborted.
        stops: tokens that end the answer.
        fewest_new: fewest tokens of an answer that `stops` may end.
        leader: sequence with the same prompt, which computes it, and is added later; None: itself
            does.
        scored: whether all tokens of its prompt are to be computed, since they are scored.
        chain: chain that shares out the prompt, however short it is; None: that of the limits.
        group: ranks that compute all of the prompt, where groups grow; None: they are planned.
        priority: sequences of a lower number are admitted before those of a higher one.
        salt: what its keys and values depend on beside its tokens and the model; only sequences of
            the same salt share blocks.
        arrived: time of the arrival in seconds, which never goes back.
        prompt: tokens of the prompt.
        computed: tokens whose keys and values its blocks hold, while it runs.
        blocks: its blocks, in the order of positions.
        digests: digests of its full blocks as far as they are known.
        home: rank of a short sequence.
        fed: tokens that the iteration under way feeds.
        block_size: tokens of a block.
        settled: full blocks that are known to move or to stay.
        evened_out: whether its blocks have been moved so that ranks hold equal shares.
        pieces: chunks of a prompt that has ranks of its own, with these ranks.
    """

    number: int
    tokens: list[int]
    most_new: int
    stops: frozenset[int] = frozenset()
    fewest_new: int = 0
    leader: int | None = None
    scored: bool = False
    chain: Chain | None = None
    group: Ranks | None = None
    priority: int = 0
    salt: bytes = b""
    arrived: float = 0.0
    prompt: int = field(init=False)
    computed: int = field(default=0, init=False)
    blocks: SequenceBlocks = field(default_factory=SequenceBlocks, init=False)
    digests: list[bytes] = field(default_factory=list, init=False)
    home: int = field(default=0, init=False)
    fed: int = field(default=0, init=False)
    block_size: int = field(default=1, init=False)
    settled: int = field(default=0, init=False)
    evened_out: bool = field(default=False, init=False)
    pieces: Sequence[Piece] = field(default=(), init=False)

    def __post_init__(self) -> None:
        assert self.tokens, "a sequence needs tokens"
        assert self.most_new >= 0, "an answer has no fewer than no tokens"
        self.prompt = len(self.tokens)
        # The answer is added to them.
        self.tokens = list(self.tokens)

    @property
    def holds(self) -> bool:
        """Whether only its prompt is computed, for others that read its blocks."""
        return not self.most_new

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer has ended with its last token; None: it goes on."""
        new = len(self.tokens) - self.prompt
        if self.tokens[-1] in self.stops and new > self.fewest_new:
            return "stop"
        return "length" if new == self.most_new else None

    @property
    def left(self) -> Sequence[Piece]:
        """Chunks, of those with ranks of their own, that are not all computed."""
        return [piece for piece in self.pieces if piece.end > self.computed]

    @property
    def full(self) -> int:
        """Blocks whose keys and values are all computed."""
        return self.computed // self.block_size
