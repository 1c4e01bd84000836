"""The accounting of rows, and exchanges and bytes made of it, against rows listed one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.rows import (
    MOST_PIECES,
    PIECE_ROWS,
    CallRowCounts,
    PartialRows,
    RankRows,
    rank_rows,
)
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Mask, Plan
from distca.runtime import build_exchange
from distca.runtime.exchange import Rows
from support.random_plans import random_lengths, random_plan
from support.served_rows import taken_rows

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=8, dtype_bytes=2)


@dataclass(frozen=True)
class Listed:
    """Rows of a kind on one rank, each by itself.

    Attributes:
        local: tokens that it owns, in global positions, as its rows.
        sent: local rows that it sends, and to whom, in turn.
        received: tokens that it receives, and from whom, in turn.
        calls: tokens of its calls, by whether they end on the diagonal.
    """

    local: list[int]
    sent: list[tuple[int, int]]
    received: list[tuple[int, int]]
    calls: dict[bool, list[int]]

    def served(self, token: int) -> int:
        """Number of a token among the local rows, and behind them those that arrive."""
        if token in self.local:
            return self.local.index(token)
        return len(self.local) + [each for _, each in self.received].index(token)


def listed(plan: Plan, kind: Literal["q", "kv"]) -> list[Listed]:
    """Lists the rows of all ranks: token by token, task by task."""
    offsets, prefix = np.cumsum(plan.lengths) - plan.lengths, plan.cached_prefix
    local: list[list[int]] = [[] for _ in range(plan.world_size)]
    owner = {}
    at = plan.placement
    for document, start, end, rank in zip(at.document, at.start, at.end, at.rank, strict=True):
        for position in range(start, end):
            owner[int(offsets[document] + position)] = int(rank)
            if kind == "kv" or prefix is None or position >= prefix[document]:
                local[rank].append(int(offsets[document] + position))
    calls: list[dict[bool, list[int]]] = [{} for _ in range(plan.world_size)]
    tasks = plan.tasks
    first, last = (getattr(tasks, f"{kind}_{edge}") for edge in ("start", "end"))
    for number in range(len(tasks)):
        tokens = offsets[tasks.document[number]] + np.arange(first[number], last[number])
        causal = bool(tasks.q_end[number] == tasks.kv_end[number])
        calls[tasks.server[number]].setdefault(causal, []).extend(tokens.tolist())
    needed = [sorted({token for call in each.values() for token in call}) for each in calls]
    return [
        Listed(
            local[rank],
            [
                (server, local[rank].index(token))
                for server in range(plan.world_size)
                for token in needed[server]
                if owner[token] == rank != server
            ],
            sorted((owner[token], token) for token in needed[rank] if owner[token] != rank),
            calls[rank],
        )
        for rank in range(plan.world_size)
    ]


def plan_of(seed: int, mask: Mask, with_prefix: bool) -> Plan:
    """A random plan; with a prefix the first piece of each document that has several is cached."""
    rng = np.random.default_rng(seed)
    world_size, tokens = int(rng.integers(1, 5)), int(rng.integers(20, 90))
    lengths = random_lengths(rng, world_size * tokens)
    plan = random_plan(rng, lengths, world_size, tokens, mask, block=16)
    if not with_prefix:
        return plan
    prefix = np.zeros(len(lengths), dtype=np.int64)
    at = plan.placement
    for document, start, end in zip(at.document, at.start, at.end, strict=True):
        if start == 0 and end < lengths[document]:
            prefix[document] = end
    tasks = plan.tasks[plan.tasks.q_start >= prefix[plan.tasks.document]]
    return replace(plan, tasks=tasks, cached_prefix=prefix)


def parts_of(rows: list[int]) -> tuple[int, int, int]:
    """Parts, rows that have several of them, and the parts of these."""
    several = [times for times in Counter(rows).values() if times > 1]
    return len(rows), len(several), sum(several)


def at_rank(rows: PartialRows, rank: int) -> tuple[int, int, int]:
    return int(rows.parts[rank]), int(rows.shared[rank]), int(rows.members[rank])


def check_counts(counted: RankRows, rows: Listed, rank: int) -> None:
    numbers = {causal: [rows.served(each) for each in call] for causal, call in rows.calls.items()}
    local, received = len(rows.local), len(rows.received)
    assert counted.local[rank] == local
    assert counted.sent[rank] == len(rows.sent)
    assert counted.received[rank] == received
    assert counted.destinations[rank] == len({to for to, _ in rows.sent})
    assert counted.sources[rank] == len({owner for owner, _ in rows.received})
    for causal, call in enumerate(counted.calls):
        of_call = numbers.get(bool(causal), [])
        breaks = [b != a + 1 or (a < local <= b) for a, b in pairwise(of_call)]
        pieces = sum(breaks) + bool(of_call)
        assert call.rows[rank] == len(of_call)
        assert call.received[rank] == sum(each >= local for each in of_call)
        assert call.pieces[rank] == pieces
    parts = [each for call in numbers.values() for each in call]
    in_order = bool(parts) and parts == list(range(local + received))
    assert counted.in_order[rank] == (in_order and len(numbers) == 1)
    assert counted.parts[rank] == len(parts)
    assert at_rank(counted.of_received, rank) == parts_of([row for row in parts if row >= local])
    of_local = [row for row in parts if row < local] + [row for _, row in rows.sent]
    assert at_rank(counted.of_local, rank) == parts_of(of_local)


def check_exchange(exchanged: Rows, rows: Listed, ranks: int) -> None:
    assert exchanged.local == len(rows.local)
    assert exchanged.send.tolist() == [row for _, row in rows.sent]
    assert exchanged.received == len(rows.received)
    to, source = (Counter(rank for rank, _ in each) for each in (rows.sent, rows.received))
    assert exchanged.outgoing.counts.tolist() == [to[rank] for rank in range(ranks)]
    assert exchanged.incoming.counts.tolist() == [source[rank] for rank in range(ranks)]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([Mask(), Mask(0), Mask(50)]), st.booleans())
def test_rows_are_those_listed_one_by_one(seed: int, mask: Mask, with_prefix: bool) -> None:
    """Counts of all ranks, the exchange of each, and the bytes of each pair agree with the list."""
    plan = plan_of(seed, mask, with_prefix)
    ranks = plan.world_size
    expected = listed(plan, "q"), listed(plan, "kv")
    exchanges = [build_exchange(plan, rank) for rank in range(ranks)]
    for counted, rows, name in zip(rank_rows(plan), expected, ("q", "kv"), strict=True):
        for rank in range(ranks):
            check_counts(counted, rows[rank], rank)
            check_exchange(getattr(exchanges[rank], name), rows[rank], ranks)
    for rank, exchange in enumerate(exchanges):
        q, kv = (each[rank] for each in expected)
        assert [call.causal for call in exchange.calls] == sorted(q.calls)
        for call in exchange.calls:
            for rows, taken in ((q, call.q_rows), (kv, call.kv_rows)):
                numbers = [rows.served(token) for token in rows.calls[call.causal]]
                found = taken_rows(taken, len(rows.local), len(rows.received))
                assert found.tolist() == numbers
        moved = plan_bytes(plan, SHAPE).phases["dispatch"][rank]
        sent_q, sent_kv = (Counter(to for to, _ in each.sent) for each in (q, kv))
        for other in range(ranks):
            sizes = sent_q[other] * SHAPE.q_row_bytes, sent_kv[other] * SHAPE.kv_row_bytes
            assert moved[other] == sum(sizes)


def test_rows_of_a_cached_prefix_are_sent_but_have_no_queries() -> None:
    """The random plans above have them: some are sent, and their owner has fewer queries than
    keys."""
    found = False
    for seed in range(20):
        q, kv = rank_rows(plan_of(seed, Mask(), with_prefix=True))
        found |= bool(((q.local < kv.local) & (kv.sent > 0)).any())
    assert found


@pytest.mark.parametrize("pieces", [1, MOST_PIECES, MOST_PIECES + 1])
def test_few_long_pieces_are_copied_one_by_one(pieces: int) -> None:
    """Rows of both memories: one piece is used where it lies, few long ones are copied each by
    itself, and of many the fewer ones overwrite others."""
    rows, received = pieces * PIECE_ROWS, pieces * PIECE_ROWS // 2 if pieces > 1 else 0
    call = CallRowCounts(*(np.array([each]) for each in (rows, received, pieces)))
    assert call.taken[0] == (rows if pieces > 1 else 0)
    assert call.overwritten[0] == (received if pieces > MOST_PIECES else 0)
