"""Steps of a plan: which rank passes a row on, bytes of each step, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca.cost.steps import step_bytes, stepped_bytes
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import (
    Placement,
    Plan,
    SteppedPlan,
    Tasks,
    load_plan,
    load_stepped_plan,
    save_plan,
    validate_stepped_plan,
)

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=16)


def chain(step_of_last: int = 2) -> SteppedPlan:
    """Three ranks with 4, 3 and 2 blocks of a document: each passes keys on to the next."""
    edges = [0, 4, 7, 9]
    placement = Placement(
        np.zeros(3, dtype=np.int64),
        *(np.array(each) for each in (edges[:3], edges[1:], range(3))),
        3,
    )
    pairs = [(q, kv) for q in range(3) for kv in range(q + 1)]
    rows = [(0, edges[q], edges[q + 1], edges[kv], edges[kv + 1], q) for q, kv in pairs]
    step = np.array([q - kv for q, kv in pairs])
    step[3] = step_of_last
    return SteppedPlan(Plan(np.array([9]), placement, Tasks.from_rows(rows), block=1), step)


def moved(plan: SteppedPlan) -> list[list[tuple[int, int, int]]]:
    """(source, server, rows) of the keys of each step."""
    return [
        [tuple(map(int, row)) for row in zip(*each.kv.moved(), strict=True)]
        for each in plan.step_segments
    ]


def test_rows_come_from_the_rank_that_needed_them_in_the_step_before() -> None:
    plan = chain()
    validate_stepped_plan(plan)
    assert moved(plan) == [[], [(0, 1, 4), (1, 2, 3)], [(1, 2, 4)]]
    # Rank 1 owns 3 rows, so those that arrived are numbered from 3.
    assert plan.step_segments[2].kv.owner_row.tolist() == [3]
    planned = stepped_bytes(plan, SHAPE)
    assert planned.total == (4 + 3 + 4) * SHAPE.kv_row_bytes
    assert sum(step.total for step in step_bytes(plan, SHAPE)) == planned.total
    assert planned.phases["dispatch"][0].tolist() == [0, 4 * SHAPE.kv_row_bytes, 0]


def test_without_relays_rows_come_from_their_owner() -> None:
    plan = replace(chain(), relays=False)
    validate_stepped_plan(plan)
    assert moved(plan) == [[], [(0, 1, 4), (1, 2, 3)], [(0, 2, 4)]]


def test_without_a_rank_that_needed_them_rows_come_from_their_owner() -> None:
    """In steps 0 and 1 at once, rank 2's first keys would have to overtake rank 1's."""
    plan = chain(step_of_last=1)
    validate_stepped_plan(plan)
    assert moved(plan) == [[], [(0, 1, 4), (0, 2, 4), (1, 2, 3)]]


def test_one_step_is_what_plans_without_steps_are() -> None:
    one = SteppedPlan.at_once(chain().plan)
    validate_stepped_plan(one)
    assert not one.in_steps
    assert one.step_segments[0].kv is one.plan.kv_segments
    assert stepped_bytes(one, SHAPE).total == plan_bytes(one.plan, SHAPE).forward().total
    assert moved(one) == [[(0, 1, 4), (0, 2, 4), (1, 2, 3)]]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([0, 1, 0, 3, 1, 0], "a step has no task"),
        ([0, -1, 0, 2, 1, 0], "a task is in no step"),
        ([0, 1, 0, 2, 1], "6 tasks in the steps of 5"),
    ],
)
def test_steps_are_numbered_in_turn(steps: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_stepped_plan(replace(chain(), step=np.array(steps)))


def test_a_row_that_a_server_is_sent_twice_is_refused() -> None:
    """Its last rank has two pieces of queries, which need the same keys in two steps."""
    stepped = chain()
    plan = stepped.plan
    rows = [tuple(map(int, row)) for row in zip(*vars(plan.tasks).values(), strict=True)]
    halves = [(0, 7, 8, 0, 4, 2), (0, 8, 9, 0, 4, 2)]
    broken = replace(plan, tasks=Tasks.from_rows([*rows[:3], *rows[4:], *halves]))
    step = np.append(np.delete(stepped.step, 3), [2, 1])
    with pytest.raises(ValueError, match="a row of kv in several steps"):
        validate_stepped_plan(SteppedPlan(broken, step))


def test_steps_are_saved(tmp_path: Path) -> None:
    plan, file = replace(chain(), relays=False), tmp_path / "plan.json"
    save_plan(plan, file)
    loaded, _ = load_stepped_plan(file)
    assert loaded.step.tolist() == plan.step.tolist()
    assert not loaded.relays
    with pytest.raises(ValueError, match="is a plan of inference, in steps"):
        load_plan(file)
    saved = json.loads(file.read_text())
    saved["tasks"] = [[*task, 1] for task in saved["tasks"]]
    file.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="its tasks have 8 numbers each"):
        load_stepped_plan(file)
