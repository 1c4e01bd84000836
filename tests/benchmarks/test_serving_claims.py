"""The page of claims of the papers on serving: each row says what stored results say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.claims import Claim, number, span, stored_json, stored_table
from benchmarks.serving import claims
from benchmarks.serving.papers import context_parallel, csps, runahead, tetris
from benchmarks.serving.papers.verdicts import REPRODUCED, VERDICT, differs, holds, judged

STORED = pages.RESULTS / "serving" / "claims.md"
ALL = {
    context_parallel: {
        "Figure": range(1, 11),
        "Table": range(2, 10),
        "Eq.": range(1, 6),
        "Algorithm": range(1, 6),
    },
    runahead: {"Figure": range(1, 12), "Table": range(1, 6), "Eq.": range(1, 8)},
    tetris: {
        "Figure": range(1, 15),
        "Table": range(1, 3),
        "Eq.": range(1, 3),
        "Algorithm": range(1, 4),
    },
    csps: {"Figure": range(1, 18), "Table": range(1, 5), "Eq.": range(1, 10), "O": range(1, 5)},
}
"""What the texts of the papers number. Of Meta's paper Table 1 has none of its claims."""


def test_the_stored_page_is_what_the_stored_results_say() -> None:
    assert STORED.read_text().startswith(claims.claims_page() + "\n")


def named(claims_of_paper: Sequence[Claim], kind: str) -> set[int]:
    """Numbers of the figures, tables or equations that rows name: "Figures 2 and 3", "2 to 5"."""
    found: set[int] = set()
    plural = rf"{re.escape(kind.rstrip('.'))}s?\.? ?" if kind != "O" else r"\bO"
    part = r"(?:\([a-z]\))?"
    some = rf"\d+{part}(?:(?:, | and | to (?!\())\d+{part})*"
    for claim in claims_of_paper:
        for numbers in re.findall(rf"{plural}({some})", claim.what):
            plain = re.sub(r"\([a-z]\)", "", numbers)
            for first, last in re.findall(r"(\d+) to (\d+)", plain):
                found |= {*range(int(first), int(last) + 1)}
            found |= {int(each) for each in re.findall(r"\d+", plain)}
    return found


@pytest.mark.parametrize("paper", ALL, ids=lambda paper: paper.__name__.rpartition(".")[2])
def test_everything_that_a_paper_numbers_has_a_row_and_no_cell_is_empty(paper) -> None:
    rows = paper.claims()
    for claim in rows:
        cells = (claim.what, claim.theirs, claim.ours, claim.comparison, claim.source)
        assert all(cell.strip() not in ("", "-") for cell in cells), claim
        assert "nan" not in claim.ours.split(), claim
        assert not any("|" in cell or "\n" in cell for cell in cells), claim
        assert VERDICT.fullmatch(claim.comparison), claim
    for kind, numbers in ALL[paper].items():
        assert set(numbers) <= named(rows, kind), (kind, set(numbers) - named(rows, kind))
    assert len({claim.what for claim in rows}) == len(rows)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Changes a figure of a page, in a copy of the results."""
    shutil.copytree(pages.RESULTS / "serving", tmp_path / "serving")
    monkeypatch.setattr(pages, "RESULTS", tmp_path)

    def change(name: str, old: str, new: str) -> None:
        path = tmp_path / "serving" / name
        text = path.read_text()
        assert text.count(old) == 1, (name, old)
        path.write_text(text.replace(old, new))

    return change


def verdict(paper, what: str) -> str:
    (found,) = (claim.comparison for claim in paper.claims() if claim.what.startswith(what))
    return found


def test_a_changed_figure_of_a_page_changes_the_verdict(results) -> None:
    what = "Table 3, Eqs. 1"
    assert verdict(context_parallel, what) == REPRODUCED
    results(
        "context_parallel.md", "are hidden | 32,000 | 32,000 |", "are hidden | 32,000 | 9,000 |"
    )
    assert verdict(context_parallel, what).startswith("differs by ")

    what = "Figure 10(b) and (c)"
    assert verdict(runahead, what) == REPRODUCED
    results("runahead.md", "| 8 | 12k | 0.338 | -0.97% |", "| 8 | 12k | 0.338 | +1.97% |")
    assert verdict(runahead, what).startswith("differs by more: ")


def test_a_changed_figure_beside_a_page_changes_a_row(results) -> None:
    before = csps.claims()
    path = pages.RESULTS / "serving" / "sparse_degradation.json"
    path.write_text(path.read_text().replace('"kl": 0.0006437952954131627', '"kl": 0.5'))
    changed = [a.what for a, b in zip(before, csps.claims(), strict=True) if a != b]
    assert changed == ["Eq. 8: least TTFT within a bound on degradation"]


OWN = {
    "context_parallel": {"Section 4.3: prefill and decode"},
    "runahead": {"Section 5: all experiments", "Appendix B: a system chooses"},
    "tetris": {"Section 2.4: prompts of", "Section 2.4: 128K tokens"},
}
"""Rows of places that `published.md` has, which say what it does not simulate."""
NAMES = {"Meta": context_parallel, "KV-Runahead": runahead, "Tetris": tetris}


def test_what_the_page_of_published_times_simulates_has_no_other_figure() -> None:
    """A row of a place that it has numbers or comparisons of takes its figures from there."""
    stored = stored_json("serving/published")
    for name, paper in NAMES.items():
        places = {
            each["place"].removeprefix(f"{name}, ")
            for each in [*stored["numbers"], *stored["comparisons"]]
            if each["place"].startswith(f"{name}, ")
        }
        named_places = {re.sub(r"^(Figure \d+)([a-z])$", r"\1(\2)", place) for place in places}
        rows = [row for row in paper.claims() if "[published.md](published.md)" in row.source]
        for place in named_places:
            number_of = place.partition(" ")[2]
            assert any(re.search(rf"\b{re.escape(number_of)}(?!\d)", row.what) for row in rows), (
                place
            )
        for row in paper.claims():
            of_place = any(row.what.startswith(place) for place in named_places)
            own = OWN[paper.__name__.rpartition(".")[2]]
            if of_place and row not in rows:
                assert row.what.startswith(tuple(own)), row.what


def test_rows_agree_with_the_comparisons_of_the_page_of_published_times() -> None:
    """Signs that are wrong there are not reproduced here, and those that are right are."""
    compared = stored_json("serving/published")["comparisons"]
    assert {each["sign"] == "right" for each in compared} == {True, False}
    rows = {paper: paper.claims() for paper in NAMES.values()}
    shown = 0
    for each in compared:
        name, _, _ = each["place"].partition(", ")
        figures = re.findall(r"\d\.\d{3}", each["ours"])
        found = [
            row for row in rows[NAMES[name]] if figures and all(f in row.ours for f in figures)
        ]
        shown += bool(found)
        for row in found:
            if each["sign"] == "right":
                assert not row.comparison.startswith(("differs by the sign", "missing", "not poss"))
            else:
                assert row.comparison.startswith("differs by the sign"), row
    # Others are of turned figures: of TP 1 and 2 over TP 8, and fastest degrees.
    assert shown >= len(compared) - 17


@pytest.mark.parametrize(
    ("run", "what"),
    [
        ("llama-405b, a token over 128,000, decode, 2 ranks of 8 GPUs", "Table 7: ms"),
        ("llama-405b, 128,000 tokens, pass-kv, 16 ranks of 8 GPUs", "Figure 8: 128K"),
        ("llama-405b, a token over 8,000, decode, 1 rank of 8 GPUs", "Table 6: ms"),
    ],
)
def test_a_changed_figure_of_published_times_changes_its_row(results, run: str, what: str) -> None:
    before = {row.what: row for row in context_parallel.claims()}
    path = pages.RESULTS / "serving" / "published.json"
    stored = json.loads(path.read_text())
    (number_of_run,) = (each for each in stored["numbers"] if each["run"] == run)
    number_of_run["ours"] *= 3
    path.write_text(json.dumps(stored))
    changed = [row.what for row in context_parallel.claims() if before[row.what] != row]
    assert any(each.startswith(what) for each in changed)
    assert verdict(context_parallel, what).startswith("differs by ")


def test_a_page_without_the_table_is_an_error(results) -> None:
    results("layouts.md", "| ranks | way | CPU s", "| processes | way | CPU s")
    with pytest.raises(ValueError, match=r"layouts.md has 0 tables that begin with \| ranks"):
        csps.claims()


def test_columns_of_one_title_are_numbered() -> None:
    rows = stored_table("serving/context_parallel", "new tokens", "pass-KV, ms")
    titles = [title for title in rows[0] if title.startswith("published")]
    assert titles == ["published", "published 2", "published 3", "published 4"]
    assert (rows[0]["published"], rows[0]["published 4"]) == ("1,110", "pass-Q")


def test_numbers_of_cells() -> None:
    cells = ("1,110", "-35%", "+0.58%", "5,203 tokens/s", "478 of 512")
    assert [number(cell) for cell in cells] == pytest.approx([1110, -0.35, 0.0058, 5203, 478])
    with pytest.raises(ValueError, match="no number in 'chain'"):
        number("chain")
    assert (span([1.0, 2.5]), span([0.994, 0.996], ".1%")) == ("1.00 to 2.50", "99.4% to 99.6%")
    assert span([1.001, 1.002]) == "1.00"


def test_verdicts_follow_the_figures() -> None:
    assert judged([1.1, 0.9], [1.0, 1.0], "noise") == REPRODUCED
    assert judged([1.12, 0.9], [1.0, 1.0], "noise") == "differs by -10% to +12%: noise"
    assert judged([21], [22], "other parts", 0.005) == "differs by -5%: other parts"
    with pytest.raises(ValueError, match="longer than argument"):
        judged([1.0], [1.0, 2.0], "one is missing")
    assert holds(True, "the sign", "noise") == REPRODUCED
    assert holds(False, "the sign", "noise") == differs("the sign", "noise")
    assert not VERDICT.fullmatch("differs by nothing")
    assert not VERDICT.fullmatch("not reproduced")


def test_verdicts_are_counted() -> None:
    every = [claim for paper in claims.papers() for claim in paper.claims]
    counts = [int(each) for each in re.findall(r"\d+", claims.counted(every))]
    assert sum(counts) == len(every)
    # A page that says that all is well would not be worth reading.
    assert min(counts[1], counts[3]) > 0
