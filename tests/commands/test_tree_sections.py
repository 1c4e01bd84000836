"""Pictures of trees: they show each pair that is seen, once, by its server; reports have them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from distca.commands.main import main
from distca.commands.tree_sections import has_trees, tree_shapes
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Plan
from distca.plan.paths import Paths
from distca.plan.saved import save_plan
from distca.schedule import ScheduleConfig, TilesScheduler, even_capacities
from support.random_trees import visible
from support.report_pages import Page, assert_usable

SHAPE = AttentionShape(8, 2, 16)
OWN = np.array([300, 40, 70, 1, 200, 90, 33])
PARENTS = np.array([-1, 0, 0, 2, -1, 4, 4])


def plan_of(own: np.ndarray, parents: np.ndarray, ranks: int = 3) -> Plan:
    paths = Paths.of(own, parents)
    capacities = even_capacities(int(own.sum()), ranks)
    scheduler = TilesScheduler(ScheduleConfig(0.05, SHAPE, block=16))
    return scheduler.plan(paths.lengths, capacities, Mask(), *paths.family)


def paths_of(plan: Plan) -> tuple[np.ndarray, ...]:
    """Queries and keys of each document."""
    assert plan.cached_prefix is not None
    zeros = np.zeros_like(plan.lengths)
    return plan.cached_prefix, plan.lengths, zeros, plan.lengths


def area(corners: np.ndarray) -> np.ndarray:
    """Areas of polygons."""
    x, y = corners[..., 0], corners[..., 1]
    return np.abs((x * np.roll(y, -1, 1) - np.roll(x, -1, 1) * y).sum(axis=1)) / 2


def test_the_picture_shows_what_queries_see() -> None:
    plan = plan_of(OWN, PARENTS)
    shapes = tree_shapes(plan)
    seen = visible(plan, Mask())
    # Half of the pairs on the diagonal are above it.
    assert area(shapes.corners).sum() == pytest.approx(seen.sum() - OWN.sum() / 2)
    by_server = np.bincount(shapes.servers, weights=area(shapes.corners), minlength=3)
    assert (np.abs(by_server - plan.loads()) <= OWN.sum() / 2).all()
    middles = shapes.corners.mean(axis=1).astype(int)
    assert seen[middles[:, 1], middles[:, 0]].all()
    assert shapes.tokens == OWN.sum()
    tokens = shapes.bars[:, 2] - shapes.bars[:, 1]
    owned = np.bincount(shapes.bars[:, 3], weights=tokens)
    assert owned.tolist() == plan.placement.tokens_per_rank().tolist()
    assert shapes.branches[:, 0].tolist() == [300, 200]


def test_of_many_trees_the_largest_are_drawn() -> None:
    own = np.tile(OWN, 3)
    parents = np.concatenate([np.where(PARENTS < 0, -1, PARENTS + n) for n in (0, 7, 14)])
    own[14] = 5000
    shapes = tree_shapes(plan_of(own, parents), 3)
    assert shapes.tokens == own[14:18].sum()


def test_a_run_s_report_shows_its_trees(tmp_path: Path) -> None:
    plan = plan_of(OWN, PARENTS)
    assert has_trees(plan)
    save_plan(plan, tmp_path / "first_plan.json", {"shape": asdict(SHAPE)})
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert_usable(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    head, *rows = page.table("All trees")
    before = [float(row[1]) for row in page.table("Loads are")[1:]]
    # Both trees begin on the first two ranks of three.
    work = np.bincount(plan.trees, weights=plan.mask.pairs(*paths_of(plan)))
    assert before == pytest.approx([*(3 * work / work.sum()).round(3), 0.0], abs=1e-3)
    assert [row[2] for row in rows] == ["411", "323"]
    # 340 and 371, 290 and 233.
    assert [row[3] for row in rows] == ["711", "523"]
    assert head[-1] == "servers that compute its attention"
    assert sum(tag == "line" for tag, _ in page.elements) == 2
