"""`distca simulate --html`: a page with the figures of `--json`, which loads nothing."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from distca.commands import html_page
from distca.commands.html_page import Cell, Span
from distca.commands.main import main
from distca.commands.simulate_report import PARTS
from distca.commands.verdict import TITLES
from support.report_pages import Page, assert_usable, shown_by_browser

JOB = """
    --distribution prolong --context 16384 --sequences 4 --layers 4 --hidden-size 512 --heads 8
    --kv-heads 4 --head-dim 64 --ffn-hidden-size 1024 --vocab-size 1000 --cluster dgx-a100 --gpus 8
    --batches 2 --tensor-model-parallel-sizes 1 2 --pipeline-model-parallel-sizes 1 --finalists 2
    --systems plain cp-p2p wlb-llm tiles
""".split()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the page of `JOB`, and next to it the output of `--json` and what the screen says
    after that; returns the page's path."""
    path = tmp_path_factory.mktemp("pages") / "new" / "report.html"
    with pytest.MonkeyPatch.context() as patched:
        printed: list[str] = []
        said: list[str] = []

        def progress(command: str, doing: str) -> contextlib.AbstractContextManager[None]:
            said.append(f"{command}: {doing}")
            return contextlib.nullcontext()

        patched.setattr("distca.commands.simulate.progress", progress)
        patched.setattr("distca.commands.simulate._write", printed.append)
        assert main(["simulate", *JOB, "--json", "--html", str(path)]) == 0
    (path.parent / "report.json").write_text(printed[0])
    (path.parent / "said").write_text("\n".join(said))
    return path


def test_the_screen_says_what_follows_the_report(written: Path) -> None:
    """Large jobs take a while to record."""
    recorded, page = (written.parent / "said").read_text().splitlines()
    assert recorded.startswith("distca simulate: records DistCA's iteration")
    assert page == f"distca simulate: writes {written}"


def test_figures_are_those_of_the_command(written: Path) -> None:
    page = Page(written.read_text())
    figures: dict[str, Any] = json.loads((written.parent / "report.json").read_text())
    assert page.figures == figures
    rows: list[dict[str, Any]] = figures["systems"]
    systems = page.table("Each system")
    assert [each[0] for each in systems[1:]] == [TITLES[row["system"]] for row in rows]
    for found, row in zip(systems[1:], rows, strict=True):
        assert found[1:4] == [
            f"{row['tokens_per_second']:,.0f}",
            f"{row['seconds']:.3f}",
            f"{row['memory_gb']:.1f}",
        ]
    parts = page.rows["Seconds of the first batch's iteration"]
    assert [each[0] for each in parts[1:]] == list(PARTS.values())
    spent = [row["seconds_by_part"] for row in rows if row["seconds_by_part"]]
    assert len(spent) == 2
    shown = [[float(each[at]) for each in parts[1:]] for at in (1, 3)]
    expected = [[max(its[part], 0.0) for part in PARTS] for its in reversed(spent)]
    assert shown == [pytest.approx(each, abs=5e-4) for each in expected]
    documents = page.table("Core attention")
    for column in (2, 3):
        assert sum(float(each[column][:-1]) for each in documents[1:]) == pytest.approx(100, abs=1)


def test_memory_of_servers_is_that_of_the_system(written: Path) -> None:
    rows = json.loads((written.parent / "report.json").read_text())["systems"]
    (ours,) = (row["memory_gb"] for row in rows if row["system"] == "tiles")
    head, *servers = Page(written.read_text()).table("Peak memory")
    # The system's is the most of all batches, these are of the first.
    most = max(float(row[1]) for row in servers)
    assert 0 < most <= ours + 0.05
    assert most == pytest.approx(ours, rel=0.2)
    assert all(each.startswith("GB sent, ") for each in head[2:])
    assert all(max(float(row[at]) for row in servers) >= 0 for at in range(2, len(head)))


def test_the_heat_map_has_the_bytes_that_servers_send(written: Path) -> None:
    page = Page(written.read_text())
    head, *servers = page.table("Peak memory")
    names, *rows = page.table("MB that")
    exchanged = [
        at for at, name in enumerate(head) if name.startswith("GB sent") and "heads" not in name
    ]
    assert names[1:] == [row[0] for row in rows]
    assert len(rows) == len(servers) > 1
    megabytes = [sum(float(cell.replace(",", "")) for cell in row[1:] if cell) for row in rows]
    assert max(megabytes) > 0
    for server, sent in zip(servers, megabytes, strict=True):
        assert sent / 1e3 == pytest.approx(sum(float(server[at]) for at in exchanged), abs=0.03)


def test_the_answer_and_the_command_stand_on_it(written: Path, capsys) -> None:
    page = Page(written.read_text())
    assert main(["simulate", *JOB]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert page.texts["h1"] == [lines[0]]
    assert lines[1] in page.texts["p"]
    (command,) = (each for each in page.texts["pre"] if each.startswith("distca simulate"))
    assert command.endswith(f"--json --html {written}")


def test_nothing_is_loaded(written: Path) -> None:
    assert_usable(written)


def test_names_are_no_markup() -> None:
    nasty = '</script><b>&"'
    made = html_page.page(
        nasty,
        nasty,
        {"name": nasty},
        [
            html_page.section(nasty, html_page.paragraph(nasty), html_page.shell(nasty)),
            html_page.table(nasty, [nasty, nasty], [(nasty, [Cell(nasty, 0.5)])]),
            html_page.stacked_bars([nasty], [(nasty, [1.0])]),
            html_page.heat_map(nasty + "2", nasty, [nasty], [nasty], [[1.0]], [[nasty]]),
            html_page.drawing(nasty, 1, 1, []),
            html_page.timeline("drawn", [nasty], [Span(0, 0.0, 1.0, nasty, nasty)], 1.0),
        ],
    )
    page = Page(made)
    assert "b" not in page.texts
    assert page.texts["h1"] == page.texts["h2"] == page.texts["pre"] == [nasty]
    cells = [[nasty, nasty], [nasty, nasty]]
    assert page.rows == {nasty: cells, nasty + "2": cells}
    assert page.figures == {"name": nasty}


def test_files_that_cannot_be_written_are_refused_first(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *JOB, "--html", str(tmp_path / "file" / "page.html")])
    assert ended.value.code == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_browser_shows_it(written: Path, tmp_path: Path) -> None:
    """Chromium runs the page's script, which zooms, and finds no error in it."""
    shown = shown_by_browser(
        written,
        tmp_path,
        """
        const slider = document.querySelector("input[data-zooms]");
        slider.value = 5;
        slider.dispatchEvent(new Event("input"));
        """,
    )
    svg = re.search(r'<svg id="timeline"[^>]*>', shown)
    assert svg is not None
    assert "width: 500%" in svg[0]
    assert shown.count("<rect") == written.read_text().count("<rect") > 8
