"""Claims of papers beside what is found here: rows of a page, and how stored figures are read.

The figures come from stored results and from code that runs in seconds, so that a test notices when
a row no longer says what the results say.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import pages

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Claim:
    """A row of a page.

    Attributes:
        what: figure, table or section of the paper, and what it shows.
        theirs: what the paper says.
        ours: what the stored results say, or the code.
        comparison: ours over theirs, or a verdict.
        source: command that gives ours, or where it is.
    """

    what: str
    theirs: str
    ours: str
    comparison: str
    source: str


def claims_table(claims: Iterable[Claim], comparison: str) -> str:
    """Formats claims as a table of Markdown.

    Args:
        claims: the rows.
        comparison: title of the column that compares.
    """
    cells = [[c.what, c.theirs, c.ours, c.comparison, c.source] for c in claims]
    return pages.table(["claim", "paper", "here", comparison, "command, or where"], cells)


def stored_csv(name: str) -> Rows:
    """Reads the rows of a stored table.

    Args:
        name: path in the folder of results, without its ending.
    """
    with (pages.RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def stored_json(name: str) -> Any:
    """Reads the figures that are stored beside a page; `name` as for `stored_csv`."""
    return json.loads((pages.RESULTS / f"{name}.json").read_text())


def stored_page(name: str) -> str:
    """Reads a stored page; `name` as for `stored_csv`."""
    return (pages.RESULTS / f"{name}.md").read_text()


def stored_table(name: str, *titles: str) -> Rows:
    """Reads a table of a stored page. Of columns with one title the second is "TITLE 2".

    Args:
        name: as for `stored_csv`.
        titles: the table's first titles, by which it is known.

    Raises:
        ValueError: the page has no such table, or several.
    """
    lines = stored_page(name).splitlines()
    begins = f"| {' | '.join(titles)} |"
    found = [at for at, line in enumerate(lines) if line.startswith(begins)]
    if len(found) != 1:
        raise ValueError(f"{name}.md has {len(found)} tables that begin with {begins}, not one")
    head, rows = list[str](), Rows()
    for title in _cells(lines[found[0]]):
        head.append(title if title not in head else f"{title} {1 + _times(title, head)}")
    for line in lines[found[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(head, _cells(line), strict=True)))
    return rows


def _times(title: str, head: Sequence[str]) -> int:
    """How many columns have a title so far."""
    return sum(re.fullmatch(rf"{re.escape(title)}( \d+)?", each) is not None for each in head)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def one(rows: Iterable[Mapping[str, str]], **wanted: str) -> dict[str, str]:
    """Returns the only row with these cells."""
    (found,) = (row for row in rows if all(row[name] == cell for name, cell in wanted.items()))
    return dict(found)


def number(cell: str) -> float:
    """Reads the first number of a cell: 0.2 of "20%", 5203.0 of "5,203 tokens/s".

    Raises:
        ValueError: there is none.
    """
    found = re.search(r"[-+]?\d[\d,]*(\.\d+)?%?", cell)
    if found is None:
        raise ValueError(f"no number in {cell!r}")
    text = found.group().replace(",", "")
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def over(ours: float, theirs: float) -> str:
    """Formats a ratio."""
    return f"{ours / theirs:.2f}"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Formats the range of the figures that are known, or the one that all of them are."""
    known = [value for value in values if not math.isnan(value)]
    least, most = (format(each, form) for each in (min(known), max(known)))
    return least if least == most else f"{least} to {most}"


def ends(values: Sequence[float], least: float | None, most: float) -> str:
    """Formats the ratios of a range's ends to published ones."""
    known = [value for value in values if not math.isnan(value)]
    low = "" if least is None else f"{min(known) / least:.2f}, "
    return f"{low}{max(known) / most:.2f}"
