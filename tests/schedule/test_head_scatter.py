"""Heads scattered over ranks: as many groups as balance them, and the bytes of two all-to-alls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distca.cost.steps import stepped_bytes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Placement, load_stepped_plan, save_plan, validate_stepped_plan
from distca.schedule.serving import nobody_holds, shard_evenly, step_plan
from distca.schedule.serving.csps.head_scatter import head_groups


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "groups"),
    [
        (8, 8, 1, 1),
        (8, 8, 4, 4),
        # Groups that share a head of keys, and several on a rank where ranks divide no heads.
        (8, 2, 4, 4),
        (8, 1, 2, 2),
        (8, 2, 3, 8),
        (32, 8, 3, 32),
        (12, 4, 3, 12),
        # Some ranks have none.
        (4, 2, 8, 4),
    ],
)
def test_groups_balance_ranks(heads: int, kv_heads: int, ranks: int, groups: int) -> None:
    assert head_groups(heads, kv_heads, ranks) == groups


@pytest.mark.parametrize(("ranks", "kv_heads", "cached"), [(2, 12, 0), (4, 2, 640), (3, 1, 96)])
def test_bytes_are_those_of_two_all_to_alls(
    ranks: int, kv_heads: int, cached: int, tmp_path: Path
) -> None:
    """Queries and outputs with their LSE of all new tokens, and keys of all, but for what is there
    already."""
    shape, new = AttentionShape(12, kv_heads, 16, 4), 240
    start = np.array([cached])
    held = shard_evenly(start * 0, start, ranks) if cached else nobody_holds(ranks)
    groups = head_groups(12, kv_heads, ranks)
    owners = shard_evenly(start, start + new, ranks)
    plan = step_plan(held, owners, "sp-ntp", Mask(), 8, in_steps=True, head_groups=groups)
    validate_stepped_plan(plan)
    each = shape.scattered(groups)
    travels = new * (2 * each.q_row_bytes + each.lse_row_bytes) + (new + cached) * each.kv_row_bytes
    moved = stepped_bytes(plan, shape)
    assert moved.total == groups * travels * (ranks - 1) // ranks
    loads = plan.plan.loads()
    assert loads.tolist() == [int(loads.mean())] * ranks
    save_plan(plan, tmp_path / "plan.json")
    assert stepped_bytes(load_stepped_plan(tmp_path / "plan.json")[0], shape).total == moved.total


def test_what_one_rank_has_stays_there() -> None:
    """Of two sequences one is long; nothing of the other travels."""
    column = np.array
    new = Placement(column([0, 0, 1]), column([0, 9, 0]), column([9, 18, 5]), column([0, 1, 1]), 2)
    stepped = step_plan(nobody_holds(2), new, "sp-ntp", Mask(), 8, in_steps=True, head_groups=2)
    validate_stepped_plan(stepped)
    plan = stepped.plan
    assert plan.tasks.server[plan.tasks.document % 2 == 1].tolist() == [1, 1]
    assert plan.tasks.server[plan.tasks.document % 2 == 0].tolist() == [0, 1]
    assert plan.q_segments.moved_rows(2).tolist() == [[0, 9], [9, 0]]
