"""The documentation: links, flags, and the code of its pages."""

from __future__ import annotations

import itertools
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.documents.document_list import ListedDocuments
from distca.palette import GREY, HIGHLIGHTS, server_colours
from megatron_patches.flags import refused
from megatron_patches.flags.followed import all_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
]
LINKING = [*PAGES, *sorted((ROOT / "benchmarks" / "results").rglob("*.md"))]
sys.path.insert(0, str(DOCS))

# Of commands that are not this repository's.
FOREIGN_FLAGS = {
    *("--nodes", "--partition", "--account", "--rdzv-backend", "--rdzv-endpoint"),
    *("--no-build-isolation", "--kv-transfer-config", "--prefill-context-parallel-size"),
}


def code_of(page: str) -> dict[str, Any]:
    """What the Python code of a page defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    return names


def test_the_reference_is_up_to_date() -> None:
    import make_reference

    assert make_reference.main(["--check"]) == 0, "run python docs/make_reference.py"


def test_the_example_of_own_documents(tmp_path, monkeypatch) -> None:
    (tmp_path / "documents" / "train").mkdir(parents=True)
    tokens, weights = np.arange(5), np.array([0, 0, 1, 0.5, 1])
    np.savez(tmp_path / "documents" / "train" / "first.npz", tokens=tokens, weights=weights)
    monkeypatch.chdir(tmp_path)
    found = ListedDocuments("it", code_of("fine_tuning.md")["documents"](None, "train"), 5)
    assert found.read(0, 1, 4).tolist() == [1, 2, 3]
    assert list(found.loss_weights(0, 1, 4)) == [0, 1, 0.5]


def anchors_of(page: Path) -> set[str]:
    """What links into a page can name: its headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)[ #]*$", text, re.MULTILINE):
        shown = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-")
        # The second of equal headings has a number, and so on.
        equal = sum(re.fullmatch(rf"{anchor}(-\d+)?", each) is not None for each in found)
        found.add(f"{anchor}-{equal}" if equal else anchor)
    return found


def test_anchors_are_as_github_writes_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `--flag`, and more\n```\n# code\n```\n## [Twice](a.md) #\n## Twice\ntext # text\n"
    )
    assert anchors_of(page) == {"a---flag-and-more", "twice", "twice-1"}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)[^)]*\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        # Only pages have anchors, and a file that leaves the repository is nobody else's.
        inside = target.resolve().is_relative_to(ROOT.resolve()) and target.exists()
        if not inside or (anchor and anchor not in anchors_of(target)):
            missing.append(link)
    assert not missing


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    """A line of a table that follows other text is its heading."""
    tables = re.findall(r"(?:^\|.*\n?)+", page.read_text(), re.MULTILINE)
    rules = [table.splitlines()[1:2] for table in tables]
    assert [rule for rule in rules if not rule or not re.fullmatch(r"[|: -]+", rule[0])] == []


@cache
def known_flags() -> set[str]:
    """Every flag that a parser or a script of this repository knows."""
    folders = ("distca", "megatron_patches", "data", "benchmarks", "docs", "launch", "tests")
    sources = [DOCS / "reference.md"]
    for folder in folders:
        sources += [path for kind in ("py", "sh") for path in (ROOT / folder).rglob(f"*.{kind}")]
    found = set(re.findall(r"--[a-z0-9][a-z0-9-]*", "\n".join(s.read_text() for s in sources)))
    found |= {f"--{name}" for name in all_names()}
    return found | {flag.replace("--", "--no-", 1) for flag in found} | FOREIGN_FLAGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page: Path) -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", page.read_text()))
    assert flags <= known_flags()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    folders = "distca|megatron_patches|data|benchmarks|launch|tests|docs"
    named = re.findall(rf"(?<![\w./])(?:{folders})/[\w./]+\.\w+", page.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_index_of_the_docs_lists_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    others = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert others <= set(re.findall(r"\]\((\w+\.md)\)", index))


def test_the_index_of_the_benchmarks_lists_every_command() -> None:
    index = (ROOT / "benchmarks" / "README.md").read_text()
    commands = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        if "__main__" in path.read_text()
    ]
    assert commands
    assert [command for command in commands if command not in index] == []


def test_every_flag_of_distca_has_a_page() -> None:
    advice, tables = (DOCS / "reference.md").read_text().split("## pretrain_gpt.py", 1)
    flags = {
        flag.replace("[no-]", "")
        for flag in re.findall(r"^\| `(--(?:\[no-\])?distca-[\w-]+)", tables, re.MULTILINE)
    }
    assert len(flags) > 20
    assert flags <= set(re.findall(r"--distca-[\w-]+", advice))


def test_the_page_of_refusals_has_all_refused_flags_and_no_others() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| flags \| why \|\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()]
    groups = refused.REFUSED, refused.REFUSED_BY_OUR_ATTENTION, refused.REFUSED_WITH_DISTCA
    names = {name for group in itertools.chain(*groups) for name, _ in group.flags()}
    assert set(re.findall(r"`--([a-z0-9-]+)", "".join(cells))) == names
    # Values that are accepted: numbers and other flags stand in words.
    for name, values in ((n, v) for group in itertools.chain(*groups) for n, v in group.flags()):
        (cell,) = (each for each in cells if f"`--{name}`" in each)
        words = {value for value in values if re.fullmatch("[a-z_]+", value)}
        assert words <= set(re.findall(r"`(\w+)`", cell)), name


def test_the_readme_fits_a_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_docs_are_short() -> None:
    """Words of all pages without the reference, which is generated."""
    words = {page.name: len(page.read_text().split()) for page in DOCS.glob("*.md")}
    del words["reference.md"]
    assert sum(words.values()) <= 15_000, words


def test_the_picture_of_the_readme_shows_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plot_packed_beside_tiles as picture

    assert picture.main([str(tmp_path / "picture.svg")]) == 0
    drawn = (tmp_path / "picture.svg").read_text()
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"(\d\.\d+ to \d\.\d+) times the mean .*?, (\d\.\d+ to \d\.\d+) with", readme)
    assert found is not None
    for balance in found.groups():
        assert f"servers compute {balance} times the mean" in drawn


def test_the_picture_of_trees_shows_every_visible_pair(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import plot_trees as picture
    from matplotlib.figure import Figure

    assert picture.main([str(tmp_path / "picture.svg")]) == 0
    drawn = (tmp_path / "picture.svg").read_text()
    plan = picture.plan_of_trees()
    loads = plan.loads() / plan.loads().mean()
    assert loads.max() < 1.06
    for rank, load in enumerate(loads):
        assert f"rank {rank}: {load:.2f} times the mean load" in drawn
    # The polygons have the area of what queries see, in square thousands of tokens.
    axes = Figure().subplots()
    picture.draw_tasks(axes, picture.tree_shapes(plan), server_colours(4, range(4)))
    (tasks,) = axes.collections
    x, y = np.array([path.vertices[:4] for path in tasks.get_paths()]).transpose(2, 0, 1)
    area = np.abs((x * np.roll(y, -1, 1) - y * np.roll(x, -1, 1)).sum(1)).sum() / 2
    # The diagonal halves the cells of own tokens.
    assert area == pytest.approx((plan.loads().sum() - plan.own_lengths.sum() / 2) / 1e6, rel=1e-6)


def test_highlighted_servers_have_colours_that_differ_in_black_and_white() -> None:
    """Neighbours in the list differ most, and all others are of one grey."""
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgba

    highlighted = [12, 7, 11, 3, 0]
    colours = server_colours(16, highlighted)
    assert [tuple(colours[server]) for server in highlighted] == [to_rgba(c) for c in HIGHLIGHTS]
    others = [server for server in range(16) if server not in highlighted]
    assert {tuple(colours[server]) for server in others} == {to_rgba(GREY)}
    grey = colours[highlighted][:, :3] @ [0.2126, 0.7152, 0.0722]
    assert np.abs(np.diff(grey)).min() > 0.15
