"""Steps of a plan: which rank passes a row on, bytes of each step, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca.cost.volume import AttentionShape, plan_bytes, step_bytes
from distca.plan import Placement, Plan, Tasks, load_plan, save_plan, validate_plan

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16)


def chain(step_of_last: int = 2) -> Plan:
    """Three ranks with 4, 3 and 2 blocks of a document: each passes keys on to the next."""
    edges = [0, 4, 7, 9]
    placement = Placement(
        np.zeros(3, dtype=np.int64),
        *(np.array(each) for each in (edges[:3], edges[1:], range(3))),
        3,
    )
    rows = [
        (0, edges[q], edges[q + 1], edges[kv], edges[kv + 1], q, q - kv)
        for q in range(3)
        for kv in range(q + 1)
    ]
    rows[3] = (*rows[3][:6], step_of_last)
    return Plan(np.array([9]), placement, Tasks.from_rows(rows), block=1)


def moved(plan: Plan) -> list[list[tuple[int, int, int]]]:
    """(source, server, rows) of the keys of each step."""
    return [
        [tuple(map(int, row)) for row in zip(*each.kv.moved(), strict=True)]
        for each in plan.step_segments
    ]


def test_rows_come_from_the_rank_that_needed_them_in_the_step_before() -> None:
    plan = chain()
    validate_plan(plan)
    assert moved(plan) == [[], [(0, 1, 4), (1, 2, 3)], [(1, 2, 4)]]
    # Rank 1 owns 3 rows, so those that arrived are numbered from 3.
    assert plan.step_segments[2].kv.owner_row.tolist() == [3]
    planned = plan_bytes(plan, SHAPE)
    assert planned.total == (4 + 3 + 4) * SHAPE.kv_row_bytes
    assert sum(step.total for step in step_bytes(plan, SHAPE)) == planned.total
    assert planned.phases["dispatch"][0].tolist() == [0, 4 * SHAPE.kv_row_bytes, 0]


def test_without_a_rank_that_needed_them_rows_come_from_their_owner() -> None:
    """In steps 0 and 1 at once, rank 2's first keys would have to overtake rank 1's."""
    plan = chain(step_of_last=1)
    validate_plan(plan)
    assert moved(plan) == [[], [(0, 1, 4), (0, 2, 4), (1, 2, 3)]]


def test_one_step_is_what_plans_without_steps_are() -> None:
    plan = chain()
    one = replace(plan, tasks=replace(plan.tasks, step=np.zeros(len(plan.tasks), dtype=np.int64)))
    validate_plan(one)
    assert one.step_segments[0].kv is one.kv_segments
    assert step_bytes(one, SHAPE)[0].total == plan_bytes(one, SHAPE).forward().total
    assert moved(one) == [[(0, 1, 4), (0, 2, 4), (1, 2, 3)]]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([0, 1, 0, 3, 1, 0], "a step has no task"),
        ([0, -1, 0, 2, 1, 0], "a task is in no step"),
    ],
)
def test_steps_are_numbered_in_turn(steps: list[int], message: str) -> None:
    plan = chain()
    with pytest.raises(ValueError, match=message):
        validate_plan(replace(plan, tasks=replace(plan.tasks, step=np.array(steps))))


def test_a_row_that_a_server_is_sent_twice_is_refused() -> None:
    """Its last rank has two pieces of queries, which need the same keys in two steps."""
    plan = chain()
    t = plan.tasks
    rows = [tuple(map(int, row)) for row in zip(*list(vars(t).values())[:7], strict=True)]
    halves = [(0, 7, 8, 0, 4, 2, 2), (0, 8, 9, 0, 4, 2, 1)]
    broken = replace(plan, tasks=Tasks.from_rows([*rows[:3], *rows[4:], *halves]))
    with pytest.raises(ValueError, match="a row of kv in several steps"):
        validate_plan(broken)


def test_steps_are_saved(tmp_path: Path) -> None:
    plan = chain()
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json")[0].tasks.step.tolist() == plan.tasks.step.tolist()
