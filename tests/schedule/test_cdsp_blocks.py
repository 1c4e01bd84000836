"""Blocks of prompts on growing groups, and strategies by name."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.cdsp import Chunk
from distca.schedule.serving.cdsp.pieces import Piece, cut_at_blocks
from distca.schedule.serving.cdsp.strategies import PREFILL_STRATEGIES, strategy_of
from distca.schedule.serving.prefix_cache import Block, PrefixCache
from distca.simulate.serving.prefill_blocks import PrefillBlocks

SIZE = 4


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 8), (1, 4)])
def test_growing_moves_just_what_new_members_lack(before: int, after: int) -> None:
    """From n to 2n ranks half of the rows move, and none between old members."""
    pool = BlockPool(after, 64, SIZE)
    blocks = PrefillBlocks(PrefixCache(pool))
    many = 8 * after
    pieces = [
        Piece(0, many * SIZE, frozenset(range(before))),
        Piece(many * SIZE, 2 * many * SIZE - 1, frozenset(range(after))),
    ]
    assert blocks.reserve(7, pieces)
    first = blocks.begin(7, pieces[0])
    assert not first.moves
    second = blocks.begin(7, pieces[1])
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
    blocks.release(7)
    assert not any(pool.referenced(rank) for rank in range(after))


def test_blocks_of_prompts_on_growing_groups() -> None:
    """No block is anyone else's, whatever the groups and lengths are, and none is left behind."""
    drawn = random.Random(1)
    pool = BlockPool(4, 40, SIZE)
    blocks = PrefillBlocks(PrefixCache(pool))
    held: dict[int, tuple[list[Piece], int]] = {}
    refused = 0
    for number in range(400):
        order, edges = drawn.sample(range(4), 4), [0]
        while len(edges) < 4:
            edges.append(edges[-1] + drawn.randint(1, 9) * SIZE)
        edges[-1] -= drawn.randint(0, SIZE - 1)
        groups = sorted(drawn.choices([1, 2, 3, 4], k=3))
        pieces = [
            Piece(start, end, frozenset(order[:degree]))
            for start, end, degree in zip(edges, edges[1:], groups, strict=False)
        ]
        free = [pool.free(rank) for rank in range(4)]
        if not blocks.reserve(number, pieces):
            refused += 1
            assert [pool.free(rank) for rank in range(4)] == free
        else:
            held[number] = pieces, 0
        for each in drawn.sample(sorted(held), min(2, len(held))):
            pieces, done = held[each]
            if done == len(pieces) or drawn.random() < 0.1:
                blocks.release(each)
                del held[each]
                continue
            found = blocks.begin(each, pieces[done])
            held[each] = pieces, done + 1
            assert len(found.blocks) == -(-pieces[done].end // SIZE)
            owned = Counter(block.rank for block in found.blocks)
            assert {*owned} <= pieces[done].ranks
            assert max(owned.values()) - min(owned[r] for r in pieces[done].ranks) <= 1
            assert list(found.blocks) == list(blocks.blocks(each))
            theirs = [block for other in held for block in blocks.blocks(other)]
            assert len({*theirs}) == len(theirs)
    assert refused
    for each in held:
        blocks.release(each)
    assert not any(pool.referenced(rank) for rank in range(4))


def test_blocks_of_prompts_with_cached_prefixes() -> None:
    """What is reserved is enough, shared blocks are only ever read, and none is left behind."""
    drawn = random.Random(2)
    cache = PrefixCache(BlockPool(4, 24, SIZE))
    blocks = PrefillBlocks(cache)
    held: dict[int, tuple[list[Piece], int, list[bytes], set[Block]]] = {}
    hits = moved = 0
    for number in range(600):
        count = drawn.randint(2, 20)
        names = [bytes([drawn.randrange(3), place]) for place in range(count)]
        if drawn.random() < 0.8:
            names = [bytes([0, place]) for place in range(count)]
        found = cache.find(names[: count - 1])
        holders = {block.rank for block in found}
        order = [*holders, *(rank for rank in drawn.sample(range(4), 4) if rank not in holders)]
        edges = [len(found) * SIZE, drawn.randint(len(found) + 1, count) * SIZE, count * SIZE]
        groups = sorted(drawn.choices(range(max(len(holders), 1), 5), k=2))
        pieces = [
            Piece(start, end, frozenset(order[:degree]))
            for start, end, degree in zip(edges, edges[1:], groups, strict=False)
            if end > start
        ]
        if not blocks.reserve(number, pieces, found):
            cache.release(found)
        else:
            hits += bool(found)
            held[number] = pieces, 0, names, {*found}
        for each in drawn.sample(sorted(held), min(2, len(held))):
            pieces, done, names, shared = held[each]
            if done == len(pieces) or drawn.random() < 0.2:
                computed = pieces[done - 1].end // SIZE if done else len(shared)
                blocks.release(each, names[:computed])
                del held[each]
                continue
            before = len(blocks.blocks(each))
            given = blocks.begin(each, pieces[done])
            written = {*given.blocks[before:], *(move.to for move in given.moves)}
            others = {b for o in held if o != each for b in blocks.blocks(o)}
            findable = {*cache._digests}
            assert not written & (others | findable | shared)
            moved += any(move.source in shared for move in given.moves)
            held[each] = pieces, done + 1, names, shared
    assert hits > 50
    assert moved > 10
    for each in held:
        blocks.release(each)
    assert not any(cache.referenced(rank) for rank in range(4))
    cache.reset()
    assert all(cache.free(rank) == 24 for rank in range(4))


def test_chunks_end_where_blocks_do() -> None:
    def chunk(cached: int, tokens: int, ranks: int) -> Chunk:
        return Chunk(cached, tokens, frozenset(range(ranks)), 0.0, 1.0)

    found = cut_at_blocks([chunk(0, 3, 1), chunk(3, 8, 2), chunk(11, 6, 4)], SIZE)
    assert [(each.start, each.end, len(each.ranks)) for each in found] == [(0, 8, 2), (8, 17, 4)]


def test_strategies_by_name() -> None:
    assert strategy_of("cdsp") is PREFILL_STRATEGIES["cdsp"]
    assert strategy_of("fixed-2") is not None
    for name, why in (("fixed-3", "no power of two"), ("fixed", "no strategy"), ("x", "fixed-N")):
        with pytest.raises(ValueError, match=why):
            strategy_of(name)
