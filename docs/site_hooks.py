"""Hooks of mkdocs: pages from other folders, links between them, and the reference of the library.

Pages link to each other by paths in the repository, as GitHub shows them. The site has the pages of
`docs` at its top, and those of other folders below it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PLACES = {"README.md": "project.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
"""Where pages of the repository's root are on the site."""

LIBRARY = {
    "Training: `distca.library`": ("distca.library",),
    "Hugging Face models in training": (
        "distca.library.hugging_face.register",
        "distca.library.hugging_face.planner_arguments",
        "distca.library.hugging_face.inputs_of",
    ),
    "Inference": (
        "distca.inference.llm.LLM",
        "distca.inference.defaults.configure",
        "distca.inference.models.read_model",
        "distca.inference.sampling.SamplingParams",
        "distca.inference.sampling.Penalties",
        "distca.inference.messages.RequestOutput",
        "distca.inference.messages.Completion",
    ),
}
"""What the reference of the library has, under each heading."""


def library_page() -> str:
    """The reference of the library, for mkdocstrings."""
    lines = ["# The library"]
    for title, names in LIBRARY.items():
        lines += ["", f"## {title}", *(f"\n::: {name}" for name in names)]
    return "\n".join(lines) + "\n"


def place_of(path: str) -> str | None:
    """Where a file of the repository is on the site; None: nowhere."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/") and path.endswith((".md", ".png")):
        return path
    return PLACES.get(path)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds pages and pictures of other folders, and the reference of the library."""
    others = sorted((ROOT / "benchmarks").rglob("*.md")) + sorted(
        (ROOT / "benchmarks").rglob("*.png")
    )
    for path in [*others, *(ROOT / name for name in PLACES)]:
        place = place_of(path.relative_to(ROOT).as_posix())
        assert place is not None
        files.append(File.generated(config, place, abs_src_path=str(path)))
    files.append(File.generated(config, "api.md", content=library_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links by places on the site; those to files that it does not have become text."""
    source = Path(page.file.abs_src_path or ROOT / "docs" / page.file.src_uri)
    path = source.relative_to(ROOT).as_posix()

    def relinked(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        file, hash_, anchor = target.partition("#")
        if not file:
            return link[0]
        place = place_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), file)))
        if place is None:
            return text
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"{mark}[{text}]({posixpath.relpath(place, start)}{hash_}{anchor})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?://)([^)\s]+)\)", relinked, markdown)
