"""Parts of reports in HTML: one file that loads nothing, for a browser without a network.

Figures are tables, so that screen readers and searches find them. Bars and timelines are drawn
beside these, and colours are never all that tells two things apart.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distca.palette import GREY, IN_TURN, PURPLE
from distca.whole_file import write_text

COLOURS = (*IN_TURN, GREY, PURPLE)
"""Colours of what is drawn beside each other, in turn."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
caption { text-align: left; padding-bottom: .5rem; }
th, td { padding: .25rem .75rem; text-align: right; vertical-align: top; }
th { font-weight: 600; }
th[scope=row], td.text, th.text { text-align: left; }
th[scope=row] { white-space: nowrap; }
tbody tr:nth-child(odd) { background: #8881; }
tr.best th, tr.best td { font-weight: 700; }
.bar { background: #0072b2; height: .35rem; margin-left: auto; }
.parts { display: flex; height: 1.6rem; margin: .2rem 0 .8rem; }
.parts > div { border-right: 1px solid Canvas; box-sizing: border-box; }
.swatch { display: inline-block; height: .8rem; width: .8rem; margin-right: .4rem; }
pre { background: #8882; overflow-x: auto; padding: .75rem; }
.scroll { overflow-x: auto; border: 1px solid #8886; }
.scroll:focus { outline: 2px solid #0072b2; }
svg text { fill: CanvasText; font: 11px system-ui, sans-serif; }
"""
_SCRIPT = """
for (const zoom of document.querySelectorAll("input[data-zooms]")) {
  const drawing = document.getElementById(zoom.dataset.zooms);
  zoom.addEventListener("input", () => { drawing.style.width = zoom.value * 100 + "%"; });
}
"""
_ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it says.
        share: length of a bar below the text, from 0 to 1; None: there is no bar.
        is_text: whether it is words, which begin at the left, rather than a number.
    """

    text: str
    share: float | None = None
    is_text: bool = False

    def __str__(self) -> str:
        bar = ""
        if self.share is not None:
            # Not a share of the column: bars of several columns are compared.
            bar = f'<div class="bar" style="width:{7 * min(self.share, 1.0):.2f}rem"></div>'
        return f"<td{' class=text' * self.is_text}>{html.escape(self.text)}{bar}</td>"


@dataclass(frozen=True)
class Span:
    """Something that takes time, in a timeline.

    Attributes:
        row: number of the line that it is drawn on.
        start, end: seconds.
        name: what it is.
        kind: what spans of one colour have in common.
    """

    row: int
    start: float
    end: float
    name: str
    kind: str


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[tuple[str, Sequence[Cell]]],
    best: str | None = None,
) -> str:
    """Returns a table.

    Args:
        caption: what it shows.
        heads: titles of its columns, the first that of the rows' names.
        rows: name and cells of each row.
        best: name of a row in bold type, or None.
    """
    listed = list(rows)
    words = {at for _, cells in listed for at, cell in enumerate(cells, start=1) if cell.is_text}
    titles = "".join(
        f'<th scope="col"{" class=text" * (at in words or at == 0)}>{html.escape(each)}</th>'
        for at, each in enumerate(heads)
    )
    body = "\n".join(
        f'<tr{" class=best" * (name == best)}><th scope="row">{html.escape(name)}</th>'
        f"{''.join(map(str, cells))}</tr>"
        for name, cells in listed
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f"<table>\n<caption>{html.escape(caption)}</caption>\n<thead><tr>{titles}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def stacked_bars(
    titles: Sequence[str], bars: Sequence[tuple[str, Sequence[float]]], unit: str = "s"
) -> str:
    """Returns bars of parts, one below the other, on one scale; a table should have the numbers.

    Args:
        titles: names of the parts.
        bars: name of each bar, and the lengths of its parts, at least 0.
        unit: unit of the lengths.
    """
    longest = max((sum(parts) for _, parts in bars), default=0.0) or 1.0
    lines = []
    for name, parts in bars:
        drawn = "".join(
            f'<div style="width:{100 * part / longest:.3f}%;background:{colour}" '
            f'title="{html.escape(f"{title}: {part:.3f} {unit}")}"></div>'
            for part, title, colour in zip(parts, titles, COLOURS, strict=False)
            if part > 0
        )
        lines.append(f'<div>{html.escape(name)}</div><div class="parts">{drawn}</div>')
    return f'<div aria-hidden="true">{"".join(lines)}</div>'


def legend_cell(title: str, at: int) -> str:
    """Returns a swatch of the colour of a part, with its title."""
    return swatch(title, COLOURS[at % len(COLOURS)])


def swatch(title: str, colour: str) -> str:
    """Returns a swatch of a colour, with what it stands for."""
    return f'<span class="swatch" style="background:{colour}"></span>{html.escape(title)}'


def timeline(
    name: str, rows: Sequence[str], spans: Sequence[Span], seconds: float, height: int = 14
) -> str:
    """Returns a timeline that a slider zooms.

    Args:
        name: what it shows, a word that is its identifier on the page.
        rows: name of each line.
        spans: what is drawn, in any order.
        seconds: the end of the scale.
        height: pixels of a line.
    """
    kinds = list(dict.fromkeys(span.kind for span in spans))
    colours = {kind: COLOURS[at % len(COLOURS)] for at, kind in enumerate(kinds)}
    scale = 1000 / (seconds or 1.0)
    drawn = "".join(
        f'<rect x="{scale * each.start:.2f}" y="{each.row * (height + 2)}" '
        f'width="{max(scale * (each.end - each.start), 0.05):.2f}" height="{height}" '
        f'fill="{colours[each.kind]}"><title>{html.escape(rows[each.row])}: '
        f"{html.escape(each.name)}, {1e3 * each.start:.3f} to {1e3 * each.end:.3f} ms</title>"
        "</rect>"
        for each in spans
    )
    tall = len(rows) * (height + 2)
    labels = "".join(
        f'<div style="height:{height + 2}px;line-height:{height + 2}px">{html.escape(row)}</div>'
        for row in rows
    )
    key = " &nbsp; ".join(legend_cell(kind, at) for at, kind in enumerate(kinds))
    return (
        f"<p>{key}</p>"
        f'<p><label>Zoom <input type="range" min="1" max="40" value="1" data-zooms="{name}">'
        "</label></p>"
        '<div style="display:flex;font-size:11px"><div style="padding-right:.5rem;white-space:'
        f'nowrap">{labels}</div>'
        '<div class="scroll" tabindex="0" role="region" aria-label="timeline" style="flex:1">'
        f'<svg id="{name}" role="img" aria-label="{html.escape(name)}" style="width:100%" '
        f'height="{tall}" viewBox="0 0 1000 {tall}" preserveAspectRatio="none">{drawn}</svg>'
        "</div></div>"
    )


def heat_map(
    caption: str,
    corner: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    texts: Sequence[Sequence[str]],
) -> str:
    """Returns a table whose cells are the darker the greater their values are.

    Args:
        caption: what it shows.
        corner: what rows and columns are.
        rows, columns: their names.
        values: at least 0, `[row][column]`; None: the cell is empty.
        texts: what each cell says.
    """
    most = max((each for row in values for each in row if each is not None), default=0.0) or 1.0

    def cell(value: float | None, text: str) -> str:
        if value is None:
            return "<td></td>"
        # Words stay legible on both backgrounds.
        tint = f' style="background:rgba(0,114,178,{0.6 * value / most:.3f})"' * (value > 0)
        return f"<td{tint}>{html.escape(text)}</td>"

    titles = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in columns)
    body = "\n".join(
        f'<tr><th scope="row">{html.escape(name)}</th>{"".join(map(cell, *row))}</tr>'
        for name, *row in zip(rows, values, texts, strict=True)
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f"<table>\n<caption>{html.escape(caption)}</caption>\n"
        f'<thead><tr><th scope="col" class=text>{html.escape(corner)}</th>{titles}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def drawing(name: str, width: float, height: float, shapes: Iterable[str]) -> str:
    """Returns a picture of shapes of SVG, as wide as the page; a table should have what it shows.

    Args:
        name: what it shows.
        width, height: of the shapes' coordinates.
        shapes: elements of SVG.
    """
    return (
        f'<svg role="img" aria-label="{html.escape(name)}" style="width:100%;height:24rem" '
        f'viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none">{"".join(shapes)}</svg>'
    )


def section(title: str, *parts: str) -> str:
    """Returns a section of a page."""
    return f"<section><h2>{html.escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def shell(text: str) -> str:
    """Returns lines for a shell."""
    return f"<pre>{html.escape(text)}</pre>"


def page(title: str, answer: str, figures: object, parts: Sequence[str]) -> str:
    """Returns a whole page.

    Args:
        title: title of the window.
        answer: what the page has to say, in one line.
        figures: all figures, which become JSON in the element `figures`.
        parts: what stands below the answer.
    """
    # "</script>" in a name would end the element.
    data = json.dumps(figures, indent=1).replace("<", "\\u003c")
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_ALLOWED}">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{html.escape(answer)}</h1>
{body}
</main>
<script type="application/json" id="figures">{data}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def add_flag(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Adds the flag that names the file of a report."""
    group.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="Write an HTML page with all figures, tables and drawings. It needs no network.",
    )


def write_page(path: Path, text: str) -> None:
    """Writes a page, and makes its folder where there is none."""
    write_text(path, text)
