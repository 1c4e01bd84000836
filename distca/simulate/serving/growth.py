"""A prompt whose group of ranks grows between two chunks: what moving its rows exposes.

Blocks, moves and plans are those of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.cost.volume import Messages
from distca.schedule.serving.block_owners import BlockOwners
from distca.schedule.serving.blocks import Block, BlockPool, PrefixCache
from distca.schedule.serving.cdsp.chunks import Piece
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.moves import BlockTransfer, Mover
from distca.schedule.serving.request import Request
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.schedule.serving.steps import Strategy
from distca.simulate.outcome import Outcome
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.steps import simulate_step


@dataclass(frozen=True)
class PieceBlocks:
    """The blocks that a chunk is computed with.

    Attributes:
        blocks: blocks of all positions up to the chunk's end.
        moves: copies that come before the chunk's own rows are written.
    """

    blocks: tuple[Block, ...]
    moves: tuple[BlockTransfer, ...]


def grow_blocks(pieces: Sequence[Piece], cache: PrefixCache) -> list[PieceBlocks]:
    """Gives each chunk of a prompt its blocks, as the scheduler does.

    Args:
        pieces: chunks in order, from the prompt's beginning; each has the ranks of those before.
        cache: blocks of all ranks, with room for the prompt.
    """
    size, end = cache.pool.block_size, pieces[-1].end
    limits = SchedulerConfig(1, end, size, 0)
    owners = BlockOwners(cache, range(cache.pool.world_size), limits)
    mover = Mover(cache, limits.servers, size)
    request = Request(0, [0] * end, 1)
    request.block_size, request.pieces = size, pieces
    found = []
    for piece in pieces:
        moves = mover.even_out([request], piece.ranks)
        missing = -(-piece.end // size) - len(request.blocks)
        ranks = owners.of_new_blocks(request, piece.end - piece.start, missing)
        request.blocks.extend(map(cache.take, ranks))
        request.computed = piece.end
        found.append(PieceBlocks(tuple(request.blocks), tuple(moves)))
    return found


@dataclass(frozen=True)
class Growth:
    """A prompt in two chunks, on ranks and on more of them.

    Attributes:
        first: step of the first chunk.
        second: step of the second one, with the rows of the first one moving.
        free: the same, as if they had been where they belong.
        rows: rows of each layer that move.
    """

    first: Outcome
    second: Outcome
    free: Outcome
    rows: int

    @property
    def exposed(self) -> float:
        """Part of the prompt's seconds that the moves add."""
        added = self.second.seconds - self.free.seconds
        return added / (self.first.seconds + self.second.seconds)


def simulate_growth(
    costs: InferenceCosts,
    tokens: tuple[int, int],
    ranks: tuple[int, int],
    block_size: int = 128,
    strategy: Strategy = "pass-kv",
) -> Growth:
    """Simulates a prompt that is alone.

    Args:
        costs: costs of the model on its cluster.
        tokens: tokens of the first chunk and of the second one.
        ranks: ranks of the first chunk, and of the second one, the first ones among them.
        block_size: rows of a block.
        strategy: what travels in a chunk.
    """
    everyone = max(ranks)
    blocks = -(-sum(tokens) // block_size) + 1
    ends = tokens[0], sum(tokens)
    pieces = [
        Piece(start, end, frozenset(range(count)))
        for start, end, count in zip((0, ends[0]), ends, ranks, strict=True)
    ]
    given = grow_blocks(pieces, PrefixCache(BlockPool(everyone, blocks, block_size)))

    def step(number: int, moves: Messages | None) -> Outcome:
        piece = pieces[number]
        owners = np.array([block.rank for block in given[number].blocks], dtype=np.int64)
        part = ScheduledTokens(0, piece.start, piece.end - piece.start, owners)
        masks = costs.model.masks
        plan = plan_iteration([part], masks.masks, block_size, everyone, strategy)
        assert plan.prefill is not None
        plans, every = plan.prefill.plans, range(costs.model.layers)
        layers = [plans.of(layer, masks.of_layer(layer)) for layer in every]
        return simulate_step(layers, costs, moves=moves)

    moves = _messages(given[1], everyone, block_size * costs.shape.kv_row_bytes)
    rows = len(given[1].moves) * block_size
    return Growth(step(0, None), step(1, moves), step(1, None), rows)


def _messages(given: PieceBlocks, ranks: int, block_bytes: int) -> Messages:
    """Returns the bytes of a layer's moves."""
    matrix = np.zeros((ranks, ranks), dtype=np.int64)
    for move in given.moves:
        matrix[move.source.rank, move.to.rank] += block_bytes
    return Messages.of_matrix(matrix)
