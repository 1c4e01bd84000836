"""What a layer costs the host does not grow with the number of servers, and is not done twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.kernels.host_cost import RankAlone, launches_of, plan_for, worst_rank
from distca.cost import rows as cost_rows
from distca.plan import Placement, Plan, Tasks, validate_plan
from distca.runtime import Exchange, exchange


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def shared_by(servers: int) -> Plan:
    """One document of eight tokens a rank. Of rank 0's queries all others compute a part, and rank
    0 computes a part of all others' queries: both in two tasks, of either shape."""
    tokens = 8 * servers
    starts = np.arange(servers) * 8
    placement = Placement(
        np.zeros_like(starts), starts, starts + 8, np.roll(np.arange(servers), 1), servers
    )
    rows = []
    for piece, start in enumerate(starts.tolist()):
        owner = int(placement.rank[piece])
        # The last piece is rank 0's.
        server = owner if owner == 0 else 0
        rows.append((0, start, start + 8, start, start + 8, server))
        for before in range(piece):
            computed_by = int(placement.rank[before]) if owner == 0 else 0
            rows.append((0, start, start + 8, 8 * before, 8 * before + 8, computed_by))
    plan = Plan(np.array([tokens]), placement, Tasks.from_rows(rows), block=8)
    validate_plan(plan)
    return plan


@pytest.mark.parametrize(
    ("make", "servers", "piece_rows", "most"),
    [
        (plan_for, (64, 256), 512, 43),
        (plan_for, (64, 256), 1, 68),
        (shared_by, (4, 48), 512, 41),
        (shared_by, (4, 48), 1, 68),
    ],
)
def test_launches_do_not_grow_with_servers(
    make, servers, piece_rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of the busiest rank of a plan that a scheduler makes, nor those of a rank that
    shares its queries with all others, and theirs with them; also where a kernel call's rows are
    copied in pieces, be they as short as here."""
    monkeypatch.setattr(cost_rows, "PIECE_ROWS", piece_rows)
    found = []
    for number in servers:
        plan = make(number)
        alone = RankAlone(plan, worst_rank(plan))
        # The kernels' results are made.
        launches_of(alone)
        found.append(launches_of(alone))
    assert max(max(each) for each in found) <= most, found


def test_nothing_that_all_layers_share_is_worked_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are laid out once for each phase, and what transports ask of their sizes is kept."""
    laid_out = []
    layout = exchange.message_layout

    def counted(*arguments):
        laid_out.append(layout(*arguments))
        return laid_out[-1]

    monkeypatch.setattr(exchange, "message_layout", counted)
    plan = shared_by(4)
    alone = RankAlone(plan, 0)
    for _ in range(3):
        alone.forward()
        alone.backward()
    assert len(laid_out) == 4
    sizes = laid_out[0].sizes
    assert sizes.outgoing is sizes.outgoing
    assert sizes.words is sizes.words
    assert [message.rank for message in sizes.outgoing] == np.flatnonzero(sizes.send).tolist()
    assert sizes.sent == sum(sizes.send)
    for rank, begin, end in sizes.incoming:
        assert (begin, end - begin) == (sum(sizes.receive[:rank]), sizes.receive[rank])
    assert sizes.words.tolist() == [
        list(sizes.send),
        [sum(sizes.send[:rank]) for rank in range(4)],
        list(sizes.put_at),
    ]
    assert isinstance(alone.exchange, Exchange)
    # A placed copy lays its own out: its indices are elsewhere.
    assert "_layouts" not in alone.exchange.map_indices(lambda index: index).__dict__
