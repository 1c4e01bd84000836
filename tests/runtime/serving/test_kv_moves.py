"""Blocks that change their rank, on live ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from distca.cost.volume import AttentionShape
from support.ranks import Ranks

LAYERS, SIZE, BLOCKS = 3, 4, 24
SHAPE = AttentionShape(2, 2, 8, dtype_bytes=4)


def move_on_a_rank() -> tuple[int, int, int]:
    """Grows a prompt from two ranks to four, twice; returns bytes planned, counted, and of rows."""
    import torch.distributed as dist

    from distca.runtime.serving.kv_moves import PHASE, KvMoves
    from distca.runtime.serving.kv_pool import KVCache
    from distca.schedule.serving.blocks import BlockPool, PrefixCache
    from distca.schedule.serving.cdsp.chunks import Piece
    from distca.simulate.serving.growth import grow_blocks
    from distca.transport import CollectiveTransport

    rank, cpu = dist.get_rank(), torch.device("cpu")
    transport = CollectiveTransport(dist.new_group(), cpu)
    pool = KVCache(LAYERS, BLOCKS, SIZE, SHAPE, torch.float32, cpu)
    cache = PrefixCache(BlockPool(4, BLOCKS, SIZE))
    planned = rows = 0
    for _ in range(2):
        pieces = [Piece(0, 96, frozenset({0, 3})), Piece(96, 100, frozenset(range(4)))]
        first, given = grow_blocks(pieces, cache)
        before = first.blocks
        pool.keys.zero_()
        pool.values.zero_()
        for place, block in enumerate(before):
            if block.rank == rank:
                for layer, memory in layers_of(pool):
                    memory[layer, block.number] = 10.0 * place + layer
        moves = KvMoves(pool, transport, given.moves)
        planned += moves.bytes_planned
        for layer in range(LAYERS):
            moves.begins(layer)
            # What a chunk writes to the blocks that are left doesn't change what was there.
            for move in given.moves:
                if move.source.rank == rank:
                    pool.keys[layer, move.source.number] = -1.0
        for place, block in enumerate(given.blocks[: len(before)]):
            if block.rank == rank:
                for layer, memory in layers_of(pool):
                    assert (memory[layer, block.number] == 10.0 * place + layer).all()
        rows += 96
    return planned, transport.bytes_sent[PHASE], rows


def layers_of(pool) -> Iterator[tuple[int, torch.Tensor]]:
    return ((layer, memory) for layer in range(LAYERS) for memory in (pool.keys, pool.values))


def test_growing_to_twice_the_ranks_moves_half_of_the_rows(ranks: Ranks) -> None:
    """Bytes as planned, as counted, and as half of the rows have."""
    found = ranks.run(move_on_a_rank, world_size=4)
    assert all(planned == counted for planned, counted, _ in found)
    row = 2 * LAYERS * SHAPE.kv_heads * SHAPE.head_dim * SHAPE.dtype_bytes
    assert sum(counted for _, counted, _ in found) == found[0][2] * row // 2
