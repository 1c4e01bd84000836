"""Blocks of prompts on growing groups, and strategies by name."""

from __future__ import annotations

from collections import Counter

import pytest

from distca.schedule.serving.blocks import BlockPool, PrefixCache
from distca.schedule.serving.cdsp import Chunk
from distca.schedule.serving.cdsp.chunks import Piece, cut_at_blocks
from distca.schedule.serving.cdsp.strategies import PREFILL_STRATEGIES, strategy_of
from distca.simulate.serving.growth import grow_blocks

SIZE = 4


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 8), (1, 4)])
def test_growing_moves_just_what_new_members_lack(before: int, after: int) -> None:
    """From n to 2n ranks half of the rows move, and none between old members."""
    many = 8 * after
    pieces = [
        Piece(0, many * SIZE, frozenset(range(before))),
        Piece(many * SIZE, 2 * many * SIZE - 1, frozenset(range(after))),
    ]
    first, second = grow_blocks(pieces, PrefixCache(BlockPool(after, 64, SIZE)))
    assert not first.moves
    assert len(second.moves) == many * (after - before) // after
    for move in second.moves:
        assert move.source.rank < before <= move.to.rank
        assert move.source in first.blocks
        assert second.blocks[first.blocks.index(move.source)] == move.to
    assert {*Counter(block.rank for block in second.blocks).values()} == {2 * many // after}
    # Late queries are shared out as evenly as early ones.
    new = second.blocks[many:]
    late = Counter(block.rank for place, block in enumerate(new) for _ in range(place))
    assert max(late.values()) <= 1.1 * min(late.values())


def test_chunks_end_where_blocks_do() -> None:
    def chunk(cached: int, tokens: int, ranks: int) -> Chunk:
        return Chunk(cached, tokens, frozenset(range(ranks)), 0.0, 1.0)

    found = cut_at_blocks([chunk(0, 3, 1), chunk(3, 8, 2), chunk(11, 6, 4)], SIZE)
    assert [(each.start, each.end, len(each.ranks)) for each in found] == [(0, 8, 2), (8, 17, 4)]


def test_strategies_by_name() -> None:
    assert strategy_of("cdsp") is PREFILL_STRATEGIES["cdsp"]
    assert strategy_of("fixed-2") is not None
    for name, why in (
        ("fixed-3", "not a power of two"),
        ("fixed", "no strategy"),
        ("x", "fixed-N"),
    ):
        with pytest.raises(ValueError, match=why):
            strategy_of(name)
