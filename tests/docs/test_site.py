"""The documentation as a site: it builds without warnings, and fetches nothing from the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:link|script|img|iframe|source)\b[^>]*?\b(?:href|src)=[\"']?(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    names = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"README"}
    assert {page.stem for page in site.glob("*.html")} >= {*names, "index", "project", "api"}
    assert (site / "figures" / "trace.png").is_file()
    assert (site / "benchmarks" / "results" / "slow_link.png").is_file()


def test_pages_fetch_nothing_from_the_network(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert [page.name for page in pages if FETCHED.search(page.read_text())] == []
    styles = [*site.rglob("*.css")]
    far = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")
    assert [style.name for style in styles if far.search(style.read_text())] == []
    assert pages
    assert styles


def test_the_search_finds_words_of_pages_and_of_the_library(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"].split("#")[0]: "" for entry in index}
    for entry in index:
        found[entry["location"].split("#")[0]] += entry["text"]
    assert "load max/mean" in found["launching.html"]
    assert "max_tokens" in found["api.html"]


def test_the_reference_has_the_names_of_the_library(site: Path) -> None:
    from distca import library

    text = (site / "api.html").read_text()
    names = [f"library.{name}" for name in (*library.__all__, "hugging_face.register")]
    names += ["inference.llm.LLM", "inference.sampling.SamplingParams"]
    assert [name for name in names if f'id="distca.{name}"' not in text] == []
