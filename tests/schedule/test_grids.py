"""Grids: documents on many ranks, cut in queries and keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.volume import PHASES, AttentionShape, plan_bytes
from distca.plan import Mask, Placement, Plan, validate_plan
from distca.schedule import ScheduleConfig, describe, even_capacities, make_scheduler
from distca.schedule.base import plan_at_home
from distca.schedule.tiles.grid import _fewest_ranks, initial_tasks, members_of_group

SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=64)


def test_a_grid_moves_fewer_bytes_than_rings_and_keeps_the_balance() -> None:
    ranks, length = 32, 32 * 4096
    lengths = np.array([length])
    config = ScheduleConfig(shape=SHAPE)
    plan = make_scheduler("tiles", config).plan(lengths, even_capacities(length, ranks), Mask())
    validate_plan(plan)
    assert describe(plan, config).load_max_over_mean <= 1.02
    assert members_of_group(ranks, SHAPE) > 1
    assert (plan.tasks.kv_start > 0).any()
    ring = make_scheduler("packed", config).schedule(lengths, plan.placement, Mask())
    bytes_of = [describe(p, config) for p in (plan, ring)]
    assert bytes_of[0].bytes_total < 0.8 * bytes_of[1].bytes_total
    assert bytes_of[0].bytes_max_received < 0.8 * bytes_of[1].bytes_max_received


@pytest.mark.parametrize(
    ("kv_heads", "expected"), [(8, [1, 1, 1, 3, 6]), (1, [1, 1, 1, 1, 2])], ids=["MHA", "MQA"]
)
def test_groups_grow_with_the_ranks_and_with_the_width_of_keys(
    kv_heads: int, expected: list[int]
) -> None:
    shape = AttentionShape(8, kv_heads, 64)
    assert [members_of_group(ranks, shape) for ranks in (1, 2, 4, 8, 32)] == expected


def mirrored(ranks: int, inner_pieces: int = 2) -> Plan:
    """A document in mirrored slices, with tasks at home; the innermost is one piece, or two."""
    edges = np.arange(0, 2 * ranks + 1) * 1024
    if inner_pieces == 1:
        edges = np.delete(edges, ranks)
    rank = np.r_[0:ranks, ranks + inner_pieces - 3 : -1 : -1]
    at = Placement(np.zeros_like(rank), edges[:-1], edges[1:], rank, ranks)
    return plan_at_home("packed", ScheduleConfig(shape=SHAPE), edges[-1:], at, Mask())


def gridded(home: Plan) -> Plan:
    tasks = initial_tasks(home.lengths, home.placement, home.mask, SHAPE, home.block)
    plan = replace(home, tasks=tasks)
    validate_plan(plan)
    return plan


def test_grids_begin_where_they_move_fewer_bytes() -> None:
    """At 12 ranks with four query heads to a key-value head; at 9 they would move a fifth more."""
    grids = []
    for ranks in range(2, 17):
        home = mirrored(ranks)
        at_home, moved = (plan_bytes(p, SHAPE).forward().total for p in (home, gridded(home)))
        assert moved == at_home or moved < 0.95 * at_home
        grids += [ranks] if moved != at_home else []
    assert grids == [12, 13, 14, 15, 16]
    assert _fewest_ranks(SHAPE) == 12


def test_the_innermost_slice_may_be_one_piece() -> None:
    one, two = (gridded(mirrored(16, pieces)) for pieces in (1, 2))
    assert (one.tasks.kv_start > 0).any()
    assert one.loads().tolist() == two.loads().tolist()
    moved = [plan_bytes(plan, SHAPE).phases for plan in (one, two)]
    assert all((moved[0][phase] == moved[1][phase]).all() for phase in PHASES)
