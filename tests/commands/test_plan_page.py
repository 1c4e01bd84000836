"""`distca plan --html`: pages of one plan and of the comparison, with the figures of `--json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.commands.main import main
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import load_plan
from support.report_pages import Page, assert_usable, shown_by_browser

LENGTHS = [9000, 3000, 2000, 100, 1, *[400] * 40]
SIZES = "--servers 8 --tokens-per-server 4096 --heads 4 --kv-heads 2 --head-dim 64".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a plan, `plan.json`, of its page and of the comparison's, and of what `--json`
    prints with each."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "lengths.json").write_text(json.dumps(LENGTHS))
    given = ["plan", "--lengths", str(folder / "lengths.json"), *SIZES, "--json"]
    for name, more in (
        ("plan", ["--save", str(folder / "plan.json")]),
        ("compare", ["--compare", "--context-parallel-size", "3"]),
    ):
        with pytest.MonkeyPatch.context() as patched:
            printed: list[str] = []
            for module in ("plan", "plan_compare"):
                patched.setattr(f"distca.commands.{module}._write", printed.append)
            assert main([*given, *more, "--html", str(folder / "new" / f"{name}.html")]) == 0
        (folder / f"{name}.printed").write_text(printed[0])
    return folder


def test_figures_of_a_plan_are_those_of_the_command(made: Path) -> None:
    page = Page((made / "new" / "plan.html").read_text())
    printed: dict[str, Any] = json.loads((made / "plan.printed").read_text())
    assert page.figures == printed
    servers = np.array([row[1:] for row in page.table("Loads are")[1:]])
    columns = [[float(each.replace(",", "")) for each in column] for column in servers.T]
    before, after, tokens, sent, received, held = columns
    assert len(before) == 8
    assert f"{max(before):.3f}" == f"{printed['load_max_over_mean_before']:.3f}"
    assert f"{max(after):.3f}" == f"{printed['load_max_over_mean']:.3f}"
    assert f"{min(after):.3f}" == f"{printed['load_min_over_mean']:.3f}"
    assert sum(tokens) == printed["tokens"] == sum(LENGTHS)
    assert max(sent) == pytest.approx(printed["bytes_max_sent"] / 1e6, abs=0.005)
    assert max(received) == pytest.approx(printed["bytes_max_received"] / 1e6, abs=0.005)
    assert max(held) == pytest.approx(printed["bytes_max_buffered"] / 1e6, abs=0.005)
    assert f"{printed['load_max_over_mean']:.3f} times" in page.texts["h1"][0]


def test_the_heat_map_has_the_bytes_of_each_pair(made: Path) -> None:
    page = Page((made / "new" / "plan.html").read_text())
    rows = page.table("MB that")
    plan, _ = load_plan(made / "plan.json")
    sent = sum(plan_bytes(plan, AttentionShape(4, 2, 64)).forward().phases.values())
    assert rows[0][1:] == [str(server) for server in range(8)]
    for server, row in enumerate(rows[1:]):
        expected = [f"{each / 1e6:,.2f}" for each in sent[server]]
        expected[server] = ""
        assert row == [str(server), *expected]


def test_documents_name_their_owners_and_servers(made: Path) -> None:
    page = Page((made / "new" / "plan.html").read_text())
    plan, _ = load_plan(made / "plan.json")
    rows = page.table("The longest documents")[1:]
    assert [row[1] for row in rows[:4]] == ["9,000", "3,000", "2,000", "400"]
    assert len(rows) == 32
    pairs = plan.tasks.pairs(plan.mask)
    for document, _, owners, computed in rows:
        its = plan.tasks.document == int(document)
        assert {*owners.split(", ")} == {
            str(rank) for rank in plan.placement.rank[plan.placement.document == int(document)]
        }
        for part in computed.split(", "):
            server, share = part.split(": ")
            of_server = its & (plan.tasks.server == int(server))
            assert share == f"{pairs[of_server].sum() / pairs[its].sum():.0%}"
    drawn = [its for tag, its in page.elements if tag == "polygon"]
    assert len(drawn) == len(plan.tasks)


def test_many_servers_share_rows_of_the_heat_map(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    given = "--distribution pretrain --servers 70 --tokens-per-server 2048 --heads 1".split()
    assert main(["plan", *given, "--html", str(path)]) == 0
    page = Page(path.read_text())
    rows = page.table("MB that")
    assert rows[0][1:3] == ["0 to 2", "3 to 5"]
    assert rows[0][-1] == "69"
    assert len(page.table("Loads are")) == 1 + 64


def test_the_comparison_has_a_row_for_each_scheduler(made: Path) -> None:
    page = Page((made / "new" / "compare.html").read_text())
    printed: dict[str, Any] = json.loads((made / "compare.printed").read_text())
    rows = {row[0]: row[1:] for row in page.table("max/mean")[1:]}
    assert [*rows] == [*printed]
    for name, row in rows.items():
        if "error" in printed[name]:
            assert row[-1] == printed[name]["error"]
        else:
            assert row[0] == f"{printed[name]['load_max_over_mean']:.3f}"
            assert row[5] == f"{printed[name]['tasks']:,}"
    assert "does not divide" in rows["ring-zigzag"][-1]
    least = min(each.get("load_max_over_mean", 9.0) for each in printed.values())
    assert f"{least:.3f} times" in page.texts["h1"][0]


@pytest.mark.parametrize("name", ["plan", "compare"])
def test_pages_of_plans_are_usable_and_a_browser_shows_them(
    made: Path, tmp_path: Path, name: str
) -> None:
    path = made / "new" / f"{name}.html"
    assert_usable(path)
    text = path.read_text()
    shown = shown_by_browser(path, tmp_path)
    for element in ("<tr", "<td", "<polygon", "<section"):
        assert shown.count(element) == text.count(element)
    assert f"--html {path}" in Page(text).texts["pre"][-1]
