"""Blocks that sequences share: who finds them, and how long they are kept."""

from __future__ import annotations

from distca.schedule.serving.blocks import BlockPool, PrefixCache, extend_digests


def test_a_block_is_kept_until_its_room_is_needed() -> None:
    cache = PrefixCache(BlockPool(2, 3, 4))
    block = cache.take(1)
    cache.keep(block, b"first")
    assert cache.find([b"first", b"second"]) == [block]
    assert cache.find([b"second", b"first"]) == []
    cache.release([block])
    cache.release([block])
    assert (cache.free(1), cache.cached(1), cache.referenced(1)) == (2, 1, 0)
    assert block in [cache.take(1) for _ in range(3)]
    assert cache.find([b"first"]) == []


def test_a_block_whose_like_is_kept_is_given_back() -> None:
    """Also one that is kept by another digest already."""
    cache = PrefixCache(BlockPool(1, 3, 4))
    first, second = cache.take(0), cache.take(0)
    for block, digest in ((first, b"one"), (second, b"one"), (first, b"two")):
        cache.keep(block, digest)
    cache.release([first, second])
    assert (cache.free(0), cache.cached(0)) == (2, 1)
    assert cache.find([b"two"]) == []
    assert cache.find([b"one"]) == [first]


def test_a_block_that_moves_is_found_where_it_is() -> None:
    cache = PrefixCache(BlockPool(2, 3, 4))
    block = cache.take(0)
    cache.keep(block, b"one")
    to = cache.relocate(block, 1)
    assert (to.rank, cache.free(0)) == (1, 3)
    cache.release([to])
    assert cache.find([b"one"]) == [to]
    # One that nobody can find stays so.
    other = cache.take(0)
    assert cache.relocate(other, 1).rank == 1
    assert cache.find([b"one", b"two"]) == [to]


def test_each_full_block_has_a_digest_of_all_that_is_before_its_end() -> None:
    tokens = [5, 5, 5, 5, 5, 5, 5, 5, 5, 7, 5, 5]
    for size in range(1, 6):
        found = extend_digests([], tokens, size, b"model")
        assert len({*found}) == len(found) == len(tokens) // size
        for count in range(len(tokens)):
            before = extend_digests([], tokens[:count], size, b"model")
            assert before == found[: count // size]
            assert extend_digests(before, tokens, size, b"model") == found
    ours, theirs = (extend_digests([], tokens, 2, salt) for salt in (b"model", b"other"))
    assert not {*ours} & {*theirs}
