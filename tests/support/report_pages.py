"""Reports in HTML: their elements, and what every one of them must be."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

VOID = {"meta", "input"}


class Page(HTMLParser):
    """A page's elements: fails unless each is closed in turn.

    Attributes:
        texts: text of elements that hold no other, by their names.
        rows: texts of the cells of each table's rows, by the table's caption.
        addresses: what the page would load.
        elements: name and attributes of each element, in order.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.addresses: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self._caption = ""
        self.feed(text)
        self.close()
        assert self._open == []

    @property
    def figures(self) -> Any:
        """The figures that the page has as JSON."""
        return json.loads(self.texts["script"][0])

    def table(self, begins: str) -> list[list[str]]:
        """Returns the rows of the one table whose caption begins with some words."""
        (found,) = (rows for caption, rows in self.rows.items() if caption.startswith(begins))
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr" and self._caption:
            self.rows[self._caption].append([])
        if tag in ("td", "th") and self._caption:
            self.rows[self._caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table":
            self._caption = ""

    def handle_data(self, data: str) -> None:
        if not self._open:
            assert not data.strip()
            return
        self.texts.setdefault(self._open[-1], []).append(data)
        if self._open[-1] == "caption":
            self._caption = data
            self.rows[data] = []
        elif self._caption and "tr" in self._open:
            self.rows[self._caption][-1][-1] += data


def assert_usable(path: Path) -> None:
    """Fails unless a page loads nothing, and keyboards and screen readers can use it.

    Its outline has no gaps, tables have captions and name their rows and columns, what scrolls can
    be reached by keys, drawings have names or are hidden, and controls have labels.
    """
    text = path.read_text()
    page = Page(text)
    assert page.addresses == []
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://", text)
    names = [tag for tag, _ in page.elements]
    assert names.count("main") == names.count("h1") == 1
    assert page.texts["title"][0].strip()
    assert ("html", {"lang": "en"}) in page.elements
    assert names.count("table") == names.count("caption") == names.count("thead") > 0
    outline = [int(tag[1]) for tag in names if re.fullmatch(r"h\d", tag)]
    assert outline[0] == 1
    assert all(below <= above + 1 for above, below in pairwise(outline))
    for tag, its in page.elements:
        if tag == "th":
            assert its.get("scope") in ("row", "col")
        elif tag == "svg":
            assert its["role"] == "img"
            assert its["aria-label"]
        elif its.get("class") == "scroll":
            assert (its["tabindex"], its["role"]) == ("0", "region")
            assert its["aria-label"]
        elif tag == "input":
            assert re.search(r"<label>[^<]+<input", text)
    identifiers = [its["id"] for _, its in page.elements if "id" in its]
    assert len(identifiers) == len(set(identifiers))


def shown_by_browser(path: Path, folder: Path, script: str = "") -> str:
    """Returns a page's document as headless Chromium has it, after a script.

    Fails if a script of the page fails, or if the page's policy had to keep it from something.

    Args:
        path: page to show.
        folder: folder for the browser's files.
        script: statements of JavaScript.
    """
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    text = path.read_text()
    noting = """<script>
    for (const kind of ["error", "securitypolicyviolation"])
      addEventListener(kind, (event) => document.body.setAttribute("data-failed", kind));
    </script>"""
    text = text.replace("<style>", f"{noting}<style>", 1)
    (folder / "page.html").write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    quiet = "--disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [browser, "--headless", "--no-sandbox", *quiet.split(), "--disable-component-update"]
    command += ["--disable-sync", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    address = (folder / "page.html").as_uri()
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "data-failed=" not in done.stdout.partition("<body")[2].partition(">")[0]
    return done.stdout
