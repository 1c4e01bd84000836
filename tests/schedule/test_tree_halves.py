"""Nano-batches of trees: every query meets what it sees of its tree, with equal tokens on ranks."""

from __future__ import annotations

import numpy as np

from distca.cost.volume import AttentionShape
from distca.plan import LayerMasks, Mask, Plan, validate_plan
from distca.plan.span import Int64s
from distca.schedule import Documents, DocumentTrees, ScheduleConfig, TilesScheduler
from distca.schedule.training.tree_halves import borrowed_rows, plan_tree_halves
from distca.schedule.training.trees import plan_trees
from support.random_trees import met, random_nodes, visible

SHAPE = AttentionShape(8, 2, 16)
MASKS = LayerMasks((Mask(), Mask(window_left=40)))


def random_documents(random: np.random.Generator, parts: int) -> Documents:
    """Draws trees whose tokens a number divides; a last one fills up. Node by node, depth first."""
    found = []
    for _ in range(int(random.integers(1, 4))):
        own, parents = random_nodes(random)
        parents[1:] = np.maximum(parents[1:], 0)
        order, left = [], [0]
        while left:
            order.append(left.pop())
            left += np.flatnonzero(parents == order[-1])[::-1].tolist()
        turn = np.argsort(order)
        found.append((own[order], np.where(parents[order] < 0, -1, turn[parents[order]])))
    tokens = sum(int(own.sum()) for own, _ in found)
    found.append((np.array([parts - tokens % parts]), np.array([-1])))
    lengths = np.array([own.sum() for own, _ in found])
    starts = 1000 + np.cumsum(lengths) - lengths
    return Documents(lengths, starts, trees=DocumentTrees.of(found))


def stream_places(plan: Plan, documents: Documents) -> Int64s:
    """Where the tokens of a plan are in the stream, by their global positions; cached ones are at
    -1."""
    found = np.full(int(plan.own_lengths.sum()), -1)
    assert plan.cached_prefix is not None
    for document, length in enumerate(plan.lengths.tolist()):
        position = np.arange(plan.cached_prefix[document], length)
        numbers = np.full_like(position, document)
        found[plan.document_offsets[document] + position] = documents.stream_positions(
            numbers, position
        )
    return found


def rows_of(plan: Plan, rank: int) -> Int64s:
    """Global positions of a rank's rows, cached ones last."""
    p = plan.placement.of_rank(rank)
    pieces = zip(plan.document_offsets[p.document] + p.start, p.end - p.start, strict=True)
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *(first + np.arange(count) for first, count in pieces)])


def by_place(seen: Int64s, places: Int64s, first: int) -> set[tuple[int, int]]:
    """Pairs of a query and a key, by their places in the stream."""
    query, key = np.nonzero(seen)
    return set(zip((places[query] - first).tolist(), (places[key] - first).tolist(), strict=True))


def test_each_query_meets_what_it_sees(full: bool) -> None:
    cut_trees = 0
    for seed in range(400 if full else 40):
        random = np.random.default_rng(seed)
        ranks = int(random.integers(1, 4))
        documents = random_documents(random, 2 * ranks)
        trees = documents.trees
        assert trees is not None
        scheduler = TilesScheduler(ScheduleConfig(0.1, SHAPE, block=16))
        loads = np.ones(len(documents.lengths))
        both, plans = plan_tree_halves(documents, loads, scheduler, MASKS, ranks)
        whole = plan_trees(trees, scheduler, MASKS, ranks)[0]
        first = int(documents.starts[0])
        for mask, (ping, pong) in zip(MASKS.masks, plans, strict=True):
            expected = by_place(
                visible(whole, mask), stream_places(whole, documents.paths()), first
            )
            places = [
                stream_places(nano.plan, of) for nano, of in zip((ping, pong), both, strict=True)
            ]
            if pong.from_ping is not None:
                cut_trees += 1
                for rank in range(ranks):
                    rows = rows_of(pong.plan, rank)
                    cached = rows[places[1][rows] < 0]
                    assert (rows[len(rows) - len(cached) :] == cached).all()
                    of_ping = rows_of(ping.plan, rank)[
                        borrowed_rows(ping.plan, pong.from_ping, rank)
                    ]
                    places[1][cached] = places[0][of_ping]
            found: set[tuple[int, int]] = set()
            for nano, of in zip((ping, pong), places, strict=True):
                validate_plan(nano.plan)
                assert (of >= 0).all()
                assert len(set(nano.plan.own_tokens_per_rank().tolist())) == 1
                assert met(nano.plan).max() <= 1
                pairs = by_place(met(nano.plan), of, first)
                assert not found & pairs
                found |= pairs
            assert found == expected, seed
    assert cut_trees > 20
